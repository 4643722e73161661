"""Runs training steps of other libraries' models, for `launch/verify` to compare with ours."""
