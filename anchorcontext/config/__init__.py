"""The typed config: one YAML file, ``key=value`` overrides, one error message a mistake.

``sections/`` lists every key; ``python -m anchorcontext config --reference`` prints them.
"""

from anchorcontext.config.load import load_config, parse_config, resolved_yaml, save_config
from anchorcontext.config.schema import Config, WorldShape, config_hash, flat_values

__all__ = [
    "Config",
    "WorldShape",
    "config_hash",
    "flat_values",
    "load_config",
    "parse_config",
    "resolved_yaml",
    "save_config",
]
