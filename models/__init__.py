"""The GPT, in pipeline chunks and tensor-parallel shards; inference, cost prediction and weight conversion."""
