"""Commands that read a trained model: their requests and their ranks."""
