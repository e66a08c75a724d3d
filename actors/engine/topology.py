"""The network location of an engine's node, as far as its replica process knows it. `EngineInfo.labels` announces it.

Kubernetes gives a pod no labels of its node, and Sluice asks no API server. The pod's specification must pass the
labels to the container by the downward API. There are two ways to do this, and a third beside them:

    SLUICE_NODE_LABELS        "name=value,name=value" in the container's environment, for instance made of variables
                              with `fieldRef: metadata.labels['topology.kubernetes.io/zone']`
    SLUICE_NODE_LABELS_FILE   a file of a downwardAPI volume: name="value" a line, Go-quoted
    the group's `topology`    in the application's configuration: `rack` and `pod`, which win; with a `node` of its own
                              several groups on one machine can count as several nodes (tests, demonstrations)

Labels of the Ray node (`ray start --labels`, KubeRay's `labels` of a group) need none of this, since the router reads
them itself.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

ENV = "SLUICE_NODE_LABELS"
ENV_FILE = "SLUICE_NODE_LABELS_FILE"


def labels_of_process(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the labels passed to this process; SLUICE_NODE_LABELS wins over the file. Raises ValueError that names
    the source and the text at fault.
    """
    labels: dict[str, str] = {}
    if path := env.get(ENV_FILE):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as error:
            raise ValueError(
                f"{ENV_FILE}: cannot read {path} ({error.strerror}); mount it or unset it"
            ) from None
        for line in filter(None, map(str.strip, lines)):
            name, value = _split(line, f"{ENV_FILE} {path}")
            labels[name] = _unquoted(value, path)
    for item in filter(None, map(str.strip, env.get(ENV, "").split(","))):
        name, value = _split(item, ENV)
        labels[name] = value
    return {name: value for name, value in labels.items() if value}


def _split(item: str, where: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{where}: {item!r} is not name=value")
    return name.strip(), value.strip()


def _unquoted(value: str, path: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except json.JSONDecodeError as error:
        raise ValueError(f"{ENV_FILE} {path}: {value} is no quoted string ({error.msg})") from None
