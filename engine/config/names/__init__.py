"""Names that users of other engines and of earlier versions type."""
