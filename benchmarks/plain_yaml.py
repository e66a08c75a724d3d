"""A YAML loader for texts of people who may mean harm or err: what it takes is as long as it looks."""

from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):
    """A loader that refuses aliases, with which a short text stands for an endless one, and keys that occur twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"aliases (*{event.anchor}) are not allowed: write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"the key {key.value} occurs twice, again{key.start_mark}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)
