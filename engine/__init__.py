"""The engine of Triaxis, which is everything but the models.

It never imports `models` or `launch`.
"""
