"""Clusters: files and the usual ones."""

from pathlib import Path

import pytest

from engine.errors import ConfigError
from models.predict.step_time.cluster import cluster_of, load_cluster

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


@pytest.mark.parametrize(("text", "device", "nodes"), [("64xH100", "H100-SXM-80GB", 8), ("4xA100", "A100-SXM-80GB", 1)])
def test_usual_clusters(text: str, device: str, nodes: int) -> None:
    cluster = cluster_of(text)
    assert (cluster.device, cluster.nodes) == (device, nodes)
    assert cluster.num_gpus == int(text.split("x")[0])


@pytest.mark.parametrize("text", ["H100", "0xH100", "64xB9000", "12xH100"])
def test_texts_that_name_no_cluster_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        cluster_of(text)
