"""Convert models and configs between other libraries' formats and ours."""
