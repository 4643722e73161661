"""What NVIDIA's tools print becomes a table of links by UUID."""

from triaxis.launch.doctor import gpu_map

UNDERLINE, PLAIN = "\x1b[4m", "\x1b[0m"
FOUR_GPUS = (
    f"\t{UNDERLINE}GPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID{PLAIN}\n"
    "GPU0\t X \tNV18\tSYS\tPIX\tPXB\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\tSYS\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV18\tSYS\t32-63\t1\t\tN/A\n"
    "GPU3\tPIX\tSYS\tNV18\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\tSYS\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  SYS  = a path over PCIe and between sockets\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
ONE_GPU = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"
UUIDS = "0, GPU-aaaa\n1, GPU-bbbb\n2, GPU-cccc\n3, GPU-dddd\n"


def test_links() -> None:
    found = gpu_map.links(FOUR_GPUS)
    assert found[0] == {1: "NV18", 2: "SYS", 3: "PIX"}
    assert found[3] == {0: "PIX", 1: "SYS", 2: "NV18"}
    assert sorted(found) == [0, 1, 2, 3]
    assert all(found[one][other] == found[other][one] for one in found for other in found[one])


def test_one_gpu_has_no_links_and_no_answer_has_none() -> None:
    assert gpu_map.links(ONE_GPU) == {0: {}}
    assert gpu_map.links("NVIDIA-SMI has failed\n") == {}
    assert gpu_map.summary({}) == "none"


def test_uuids() -> None:
    assert gpu_map.uuids(UUIDS) == {0: "aaaa", 1: "bbbb", 2: "cccc", 3: "dddd"}
    assert gpu_map.uuids("No devices were found\n") == {}


def test_the_matrix_by_uuid_and_in_a_line() -> None:
    matrix = gpu_map.links(FOUR_GPUS)
    assert gpu_map.by_uuid(matrix, gpu_map.uuids(UUIDS))["aaaa"] == {"bbbb": "NV18", "cccc": "SYS", "dddd": "PIX"}
    assert gpu_map.by_uuid(matrix, {0: "aaaa", 1: "bbbb"}) == {"aaaa": {"bbbb": "NV18"}, "bbbb": {"aaaa": "NV18"}}
    assert gpu_map.summary(matrix) == "2 x NV18, 1 x PIX, 3 x SYS"
