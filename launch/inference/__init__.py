"""Commands that read a trained model: their request and their ranks."""
