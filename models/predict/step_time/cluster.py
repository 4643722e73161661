"""Read a cluster's nodes, links and prices from `configs/clusters/*.yaml`, or build them from text such as `64xH100`."""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from triaxis.engine.config.yaml_text import read_yaml
from triaxis.engine.errors import ConfigError
from triaxis.engine.storage.state_files import read_regular
from triaxis.models.predict.device import NO_DEVICES, Device, device_names, load_device

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster whose nodes are all equal, and whose devices are all equal.

    Attributes:
        device: name of a shipped device, or path to a device file.
        nvlink_gb_per_s: one device's bandwidth inside its node, in 10^9 bytes per second and direction.
        network_gb_per_s: one device's share of its node's network, in 10^9 bytes per second and direction.
        network_latency_us: latency between nodes, in microseconds per message.
        oversubscription: network oversubscription, at least 1.0; with 2.0, all nodes together can send half of their rates.
        price_per_gpu_hour: price in any currency.
    """

    device: str
    nodes: int
    gpus_per_node: int
    nvlink_gb_per_s: float
    network_gb_per_s: float
    network_latency_us: float
    oversubscription: float
    price_per_gpu_hour: float

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def load_device(self) -> Device:
        """Read the device's file.

        Raises:
            ConfigError: the device has no file, or the file lacks a key.
        """
        return load_device(self.device)


# Links per device and direction: data sheets of DGX A100 (600 GB/s both ways, 200 Gbit/s a GPU), DGX H100 (900, 400), DGX B200 and
# GB200 NVL72 (1,800, 400). The price is an example; replace it with your own.
_LINKS = {
    "A100": (300.0, 25.0, 1.5),
    "H100": (450.0, 50.0, 2.5),
    "H200": (450.0, 50.0, 3.0),
    "B200": (900.0, 50.0, 4.5),
    "GB200": (900.0, 50.0, 5.0),
}

_PER_NODE = {"GB200": 72}
"""GPUs that share NVLink, where these are not `GPUS_PER_NODE`."""


_TORCH_NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100-SXM-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM-80GB",
    "NVIDIA H200": "H200-SXM-141GB",
}
"""Device files by the name that `torch.cuda.get_device_name` returns; a PCIe card is another device."""


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ConfigError: the file cannot be read, a key is missing or unknown, or a value is not a positive number.
    """
    try:
        values = read_yaml(read_regular(Path(path)).decode())
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}. Give the path of a cluster file."], str(path)) from error
    names = [field.name for field in fields(Cluster)]
    if not isinstance(values, dict):
        raise ConfigError([f"it must have the keys {', '.join(names)}."], str(path))
    found = [f"{name} is missing: no link or price has a default." for name in names if name not in values]
    found += [
        f"{name} is no key of a cluster; the keys are {', '.join(names)}." for name in values if name not in names
    ]
    for name in names[1:]:
        value = values.get(name, 1)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value < 0
            or (value == 0 and name != "price_per_gpu_hour")
        ):
            found.append(f"{name} = {value!r}: it must be a positive number.")
    if not found and values["oversubscription"] < 1:
        found.append(
            f"oversubscription = {values['oversubscription']}: 1.0 is a network without any; it cannot be less."
        )
    if found:
        raise ConfigError(found, str(path))
    return Cluster(**values)


def cluster_at(text: str) -> Cluster:
    """Read a cluster file (.yaml), or build the usual cluster for a number of devices such as `64xH100`.

    Raises:
        ConfigError: the file or the text is not valid; `load_cluster` and `cluster_of` list the cases.
    """
    return load_cluster(text) if text.endswith(".yaml") else cluster_of(text)


def cluster_of_devices(torch_name: str, nodes: int, gpus_per_node: int) -> Cluster | None:
    """Build a cluster of nodes with the named devices and their usual links; None if no device file ships for the name.

    Args:
        torch_name: device name from `torch.cuda.get_device_name`.
        nodes, gpus_per_node: at least 1.
    """
    name = _TORCH_NAMES.get(torch_name)
    return None if name is None else replace(cluster_of(f"1x{name}"), nodes=nodes, gpus_per_node=gpus_per_node)


def cluster_of(text: str) -> Cluster:
    """Build the usual cluster for a number of devices, such as `64xH100` or `8xa100-sxm-80gb`; case does not matter.

    Raises:
        ConfigError: the text has another form, names no known device, or the devices do not fill nodes of 8.
    """
    match = re.fullmatch(r"(\d+)(?:x(.+))?", text, re.IGNORECASE)
    if match is None or int(match[1]) < 1:
        raise ConfigError([f"{text!r} is no number of devices. {_forms('64')}"], "--gpus")
    count, asked = int(match[1]), match[2]
    if asked is None:
        raise ConfigError([f"{count} devices of which kind? Their rates and links decide. {_forms(text)}"], "--gpus")
    known, wanted = devices_with_links(), asked.upper()
    names = [name for name in known if name.upper() == wanted]
    names = names or [name for name in known if name.upper().startswith(f"{wanted}-SXM")]
    if not names:
        raise ConfigError([f"{asked} is no device with usual links. {_forms(match[1])}"], "--gpus")
    # A plain model such as H100 means the device with the usual memory: 80 GB, else the shortest name.
    family = _family(names[0])
    name = min(names, key=lambda name: (name != f"{family}-SXM-80GB", len(name)))
    per_node = min(count, _PER_NODE.get(family, GPUS_PER_NODE))
    if count % per_node:
        raise ConfigError([f"{count} devices do not fill nodes of {per_node}: write a cluster file."], "--gpus")
    nvlink, network, price = _LINKS[family]
    return Cluster(name, count // per_node, per_node, nvlink, network, 8.0, 1.0, price)


def _family(name: str) -> str:
    return name.split("-")[0]


def devices_with_links() -> list[str]:
    """List the shipped devices whose usual links are known."""
    return [name for name in device_names() if _family(name) in _LINKS]


def _forms(count: str) -> str:
    """Describe, for an error message, the forms in which a cluster of `count` devices may be written."""
    known = devices_with_links()
    if not known:
        return f"{NO_DEVICES} Give the path of a cluster's file, whose device is the path of such a file."
    families = dict.fromkeys(map(_family, known))
    short = " or ".join(f"{count}x{family}" for family in families)
    return f"Write {short}, or one of {', '.join(known)} behind the x, or the path of a cluster's file (.yaml)."
