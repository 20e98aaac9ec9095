"""Kernels for TPUs within a program, without the places that they were written at."""

from __future__ import annotations

import base64
import binascii
import json

from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

TARGET = "tpu_custom_call"


def listed(config: str) -> str:
    """The configuration of a kernel's call, with its module as text.

    The module is bytecode, which holds the Python lines that led to the kernel; later
    versions of JAX have these beside it. What cannot be read is given back as it is.
    """
    try:
        entries = json.loads(config)
        kernel = entries["custom_call_config"]
        kernel["body"] = _text(base64.b64decode(kernel["body"], validate=True))
        kernel.pop("debug_locations", None)
    except (ValueError, KeyError, TypeError, binascii.Error, ir.MLIRError):
        return config
    return json.dumps(entries, sort_keys=True)


def _text(body: bytes) -> str:
    context = ir.Context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    with context:
        module = ir.Module.parse(body).operation
        text = module.get_asm(print_generic_op_form=True, enable_debug_info=False)
    return str(text)
