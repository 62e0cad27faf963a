"""The model: a stock causal language model of transformers under our attention and loss."""

from .attention import attention_forward, enable
from .export import export_model
from .liger import check_liger
from .load import DTYPES, build_config, build_model
from .loss import linear_cross_entropy
from .precision import set_precision
from .rope import (
    cast_parameters,
    configure_rope,
    expected_inv_freq,
    fix_rotary_buffers,
    verify_rope,
)
from .supported import check_supported, probe_model
from .train_model import PREFIX, TrainModel

__all__ = [
    "DTYPES",
    "PREFIX",
    "TrainModel",
    "attention_forward",
    "build_config",
    "build_model",
    "cast_parameters",
    "check_liger",
    "check_supported",
    "configure_rope",
    "enable",
    "expected_inv_freq",
    "export_model",
    "fix_rotary_buffers",
    "linear_cross_entropy",
    "probe_model",
    "set_precision",
    "verify_rope",
]
