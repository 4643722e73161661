"""Clusters: files and the usual ones."""

from pathlib import Path

import pytest

from triaxis.engine.errors import ConfigError
from triaxis.models.predict import device
from triaxis.models.predict.step_time import cluster
from triaxis.models.predict.step_time.cluster import cluster_of, load_cluster

SHIPPED = Path(__file__).resolve().parents[4] / "configs" / "clusters"


def test_shipped_clusters_read() -> None:
    for path in SHIPPED.glob("*.yaml"):
        assert load_cluster(path).load_device().memory_gb > 0
    assert load_cluster(SHIPPED / "h100_64.yaml") == cluster_of("64xH100")


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text((SHIPPED / "h100_64.yaml").read_text().replace("nodes: 8", "nodes: -1\nracks: 2", 1))
    with pytest.raises(ConfigError) as error:
        load_cluster(path)
    assert len(error.value.problems) == 2 and "racks" in str(error.value) and "nodes = -1" in str(error.value)
    path.write_text("device: H100-SXM-80GB\n")
    with pytest.raises(ConfigError, match="network_gb_per_s is missing"):
        load_cluster(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_cluster(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "device", "nodes"),
    [
        ("64xH100", "H100-SXM-80GB", 8),
        ("64Xh100", "H100-SXM-80GB", 8),
        ("4xA100", "A100-SXM-80GB", 1),
        ("8xh100-sxm-96gb-500w", "H100-SXM-96GB-500W", 1),
    ],
)
def test_usual_clusters(text: str, device: str, nodes: int) -> None:
    usual = cluster_of(text)
    assert (usual.device, usual.nodes) == (device, nodes)
    assert usual.num_gpus == int(text.lower().split("x")[0])


@pytest.mark.parametrize("text", ["H100", "0xH100", "64xB9000", "12xH100"])
def test_texts_that_name_no_cluster_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        cluster_of(text)


def test_what_may_be_written_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        cluster_of("64")
    assert "64 devices of which kind?" in str(error.value)
    assert "Write 64xA100 or 64xB200 or 64xGB200 or 64xH100 or 64xH200, or one of A100-SXM-80GB," in str(error.value)
    with pytest.raises(ConfigError, match=r"B300 is no device with usual links\. Write 8xA100 or"):
        cluster_of("8xB300")
    # As in an installation without the sources.
    monkeypatch.setattr(cluster, "device_names", list)
    monkeypatch.setattr(device, "device_names", list)
    for refused in (lambda: cluster_of("64xH100"), lambda: device.load_device("H999")):
        with pytest.raises(ConfigError, match="This installation has no configs/devices") as error:
            refused()
        assert "There are" not in str(error.value)


def test_gpus_that_share_nvlink_are_a_node() -> None:
    assert (cluster_of("144xGB200").nodes, cluster_of("144xB200").nodes) == (2, 18)
    with pytest.raises(ConfigError, match="do not fill nodes of 72"):
        cluster_of("80xGB200")
