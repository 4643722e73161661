"""The cost model against published runs."""
