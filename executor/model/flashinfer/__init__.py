"""Calls to FlashInfer. Nothing else imports it.

Every argument that decides about the result goes by keyword and is written out: the library's own
defaults are float16 and no causal mask. It is imported when ``FlashInferOps`` is made, so that the
executor imports without it. ``tests/executor/model/flashinfer/test_flashinfer_binding.py`` binds every call that is
made here to the installed library's signatures.
"""
