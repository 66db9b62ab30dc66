"""vLLM on tkv's kernels: an attention backend that vLLM finds by its plugin entry point."""

from __future__ import annotations

import logging
import os

BACKEND = "tkv.integrations.vllm.backend.TkvBackend"
MLA_BACKEND = "tkv.integrations.vllm.backend.RefusedMLABackend"


def register() -> None:
    """Tell vLLM where tkv's attention backend is; vLLM calls this in each of its processes.

    Nothing changes until tkv is chosen: on a GPU as vLLM's custom backend, ``attention_config={"backend": "CUSTOM"}`` or
    ``--attention-backend CUSTOM``; on a CPU, where vLLM has no choice to offer, by ``TKV_VLLM=1`` in the environment, which also takes the
    custom backend's place from another plugin. Calling it again changes nothing. The backend's module is imported when vLLM asks for it.

    Raises:
        UnsupportedError: ``TKV_VLLM=1`` is set and this version of vLLM has no such registry.

    Example:
        .. code-block:: python

            os.environ["TKV_VLLM"] = "1"                                            # a CPU
            llm = vllm.LLM(model)
            llm = vllm.LLM(model, attention_config={"backend": "CUSTOM"})           # a GPU
    """
    chosen = os.environ.get("TKV_VLLM", "") not in ("", "0")
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        slots = AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA
    except (ImportError, AttributeError) as error:
        from tkv.errors import UnsupportedError

        message = f"vllm: expected the backend registry of vLLM 0.32, for which tkv is written: {error}"
        if chosen:
            raise UnsupportedError(message) from error
        logging.getLogger(__name__).warning("%s; tkv is not available as a backend", message)
        return
    custom, cpu, *cpu_mla = slots
    # The custom backend is one place for all plugins: it is not taken from another one that nobody asked tkv to replace.
    if chosen or not custom.is_overridden():
        register_backend(custom, BACKEND)
    if chosen:
        register_backend(cpu, BACKEND)
        for backend in cpu_mla:
            register_backend(backend, MLA_BACKEND)
