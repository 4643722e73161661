"""Fields beyond a plain model are named with their values."""

from tests.engine.config.bad_configs import config_with
from triaxis.models.interop.plain_model import beyond_plain


def test_fields_beyond_a_plain_model_are_named() -> None:
    assert beyond_plain(config_with().model) == []
    model = config_with(
        "model.window=4", "model.attention_softcap=5", "model.layers=[a]", "model.layer_kinds={a: {}}"
    ).model
    assert beyond_plain(model) == [
        "model.window = 4", "model.attention_softcap = 5.0", "model.layers = ['a']", "model.layer_kinds = {'a': {}}"
    ]  # fmt: skip
