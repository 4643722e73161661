"""Pure tensor functions and the choice among their implementations, without communication or parameters."""
