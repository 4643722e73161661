"""The engine of Triaxis: everything that is not a model. It never imports `models` or `launch`."""
