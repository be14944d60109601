"""FP8 drafts by AMD Quark: `quantize_draft` makes one, `QuantReport` says what it did to each tensor.

Light: Quark, torch and vLLM are imported in child processes only (`worker.py`, `vllm_check.py`).
"""

from lab.quant.draft import Draft, read_draft
from lab.quant.kv import KvGain, Machine, kv_bytes_per_token, kv_gain, this_machine
from lab.quant.report import QuantReport, Tensor, load_report, table
from lab.quant.run import SCHEME, quantize_draft

__all__ = [
    "SCHEME",
    "Draft",
    "KvGain",
    "Machine",
    "QuantReport",
    "Tensor",
    "kv_bytes_per_token",
    "kv_gain",
    "load_report",
    "quantize_draft",
    "read_draft",
    "table",
    "this_machine",
]
