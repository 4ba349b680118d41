"""Inputs of models that no runner serves yet: they are as the contract says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.executor.graph.registry_cases import (
    COUNT_SLOTS,
    INT64,
    P,
    bound_buffers,
    bs_slot,
    content,
    decode_registry,
    fill,
    full_batch,
    full_decode_registry,
    make_registry,
    numbers,
    prefill_registry,
    view_of,
)


@pytest.mark.parametrize("wrap", [dict, lambda **tensors: SimpleNamespace(tensors=tensors)])
def test_pipeline_proxies_are_copied_by_key_and_an_absent_key_is_skipped(wrap: Any):
    buffers = {"hidden": torch.full((8, 2), 7.0), "residual": torch.full((8, 2), 7.0)}
    source = SimpleNamespace(**bound_buffers(), pp_proxy_tensors=wrap(**buffers))
    registry = decode_registry(register_global_num_tokens=False, source=source)
    slot = registry.get_slot("pp_proxy_tensors.hidden")
    assert slot.buffer is buffers["hidden"]
    assert (slot.axis, slot.dtype, slot.padding_policy) == ("none", torch.float32, P.KEEP_PAD)

    sent = wrap(hidden=torch.ones(3, 2))
    fill(registry, full_batch(3), 3, 4, pp_proxy_tensors=sent)
    assert buffers["hidden"].tolist() == [[1, 1]] * 3 + [[7, 7]] * 5
    assert bool((buffers["residual"] == 7).all())
    fill(registry, full_batch(3), 3, 4)
    assert buffers["hidden"][0].tolist() == [1, 1]


def test_structured_fields_are_filled_from_the_batchs_path_and_never_put_back():
    info = SimpleNamespace(column_starts=torch.zeros(8, dtype=torch.int32))
    source = SimpleNamespace(**bound_buffers(), ngram_info=info)
    registry = decode_registry(
        register_global_num_tokens=False,
        source=source,
        structured_fields=["ngram_info.column_starts"],
    )
    slot = registry.get_slot("ngram_info.column_starts")
    assert (slot.axis, slot.padding_policy) == ("none", P.KEEP_PAD)

    batch = SimpleNamespace(
        **vars(full_batch(2)), ngram_info=SimpleNamespace(column_starts=numbers(2))
    )
    fill(registry, batch, 2, 4)
    assert info.column_starts.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    view = view_of(registry, batch, 4)
    assert view.ngram_info is batch.ngram_info
    assert "ngram_info.column_starts" not in vars(view)

    batch.ngram_info = None
    fill(registry, batch, 2, 4)
    assert info.column_starts[:2].tolist() == [1, 2]


@pytest.mark.parametrize("path", ["ngram_info.missing", "input_ids"])
def test_a_structured_field_that_the_source_lacks_is_named(path: str):
    source = SimpleNamespace(**bound_buffers())
    with pytest.raises(ValueError, match=f"slot '{path}': need a dotted path"):
        decode_registry(register_global_num_tokens=False, source=source, structured_fields=[path])


def test_input_embeds_is_written_by_the_model_and_only_its_tail_is_reset():
    registry = prefill_registry(is_multimodal=True, hidden_size=2, embed_dtype=torch.float32)
    registry.get_slot("input_embeds").slice_for(0, 16).fill_(7)
    batch = full_batch(1, num_tokens=3)
    batch.input_embeds = torch.ones(3, 2)
    registry.fill_from(batch, raw_bs=1, padded_bs=1, raw_num_tokens=3, padded_num_tokens=4)
    assert content(registry, "input_embeds")[:5] == [[7, 7], [7, 7], [7, 7], [0, 0], [7, 7]]


def test_input_embeds_without_a_width_is_refused():
    with pytest.raises(ValueError, match="slot 'input_embeds': hidden_size=0"):
        prefill_registry(is_multimodal=True, embed_dtype=torch.bfloat16)


def test_padded_encoder_lengths_keep_the_first_value():
    registry = full_decode_registry(encoder_len_fill_value=9)
    fill(registry, full_batch(3), 3, 4)
    assert content(registry, "encoder_lens") == [1, 2, 3, 9, 9, 9, 9, 9]
    fill(registry, full_batch(2, first=5), 2, 4)
    assert content(registry, "encoder_lens") == [5, 6, 3, 9, 9, 9, 9, 9]


def bound_counts() -> dict[str, Any]:
    return {name: torch.zeros(1, dtype=torch.int32) for name in COUNT_SLOTS[1:]}


def test_the_factory_adopts_every_tensor_of_the_source_as_it_is():
    lens = {name: torch.full((8,), 6, dtype=torch.int32) for name in ("seq_lens", "seq_lens_cpu")}
    source = SimpleNamespace(**bound_buffers() | lens | bound_counts())
    registry = decode_registry(source=source, share_pool=True)
    for name in registry.slot_names():
        assert registry.get_slot(name).buffer is getattr(source, name), name
    assert registry.get_slot("seq_lens").dtype is torch.int32
    assert registry.get_slot("seq_lens_cpu").dtype is torch.int32
    assert source.seq_lens.tolist() == [6] * 8


@pytest.mark.parametrize("name", ["positions", "mrope_positions", "global_num_tokens_gpu"])
def test_a_tensor_that_the_source_lacks_is_named(name: str):
    buffers = bound_buffers() | bound_counts() | {name: None}
    with pytest.raises(ValueError, match=f"slot '{name}': source has no tensor"):
        decode_registry(source=SimpleNamespace(**buffers))


def test_the_prefill_factory_adopts_a_source_too():
    ids = torch.zeros(16, dtype=INT64)
    source = SimpleNamespace(
        input_ids=ids, positions=ids.clone(), out_cache_loc=torch.zeros(16, dtype=torch.int32)
    )
    assert prefill_registry(source=source).get_slot("input_ids").buffer is ids
    with pytest.raises(ValueError, match="slot 'positions': source has no tensor"):
        prefill_registry(source=SimpleNamespace(input_ids=ids))


def test_skipped_slots_are_neither_reset_nor_copied_nor_hooked():
    calls: list[str] = []
    registry = make_registry()
    for name in ("a", "b"):
        registry.register_slot(
            bs_slot(name, padding_policy=P.ZERO, post_fill=lambda *_, n=name: calls.append(n))
        )
        registry.get_slot(name).slice_for(8, 0).fill_(7)
    fill(registry, SimpleNamespace(a=numbers(2), b=numbers(2)), 2, 4, skip_slots={"a"})
    assert content(registry, "a") == [7] * 8
    assert content(registry, "b") == [1, 2, 0, 0, 7, 7, 7, 7]
    assert calls == ["b"]


def test_copy_slots_refreshes_the_first_rows_and_leaves_the_rest():
    registry = full_decode_registry()
    fill(registry, full_batch(8), 8, 8)
    registry.copy_slots(
        {
            "input_ids": numbers(2, first=50),
            "mrope_positions": numbers(3, 2, first=50),
            "global_num_tokens_gpu": numbers(4, dtype=torch.int32),
            "positions": None,
        }
    )
    assert content(registry, "input_ids") == [50, 51, 3, 4, 5, 6, 7, 8]
    mrope = [row[:3] for row in content(registry, "mrope_positions")]
    assert mrope == [[50, 51, 3], [52, 53, 11], [54, 55, 19]]
    assert content(registry, "global_num_tokens_gpu") == [1, 2, 3, 4]
    assert content(registry, "positions") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_copy_slots_skips_the_slots_own_view(monkeypatch: pytest.MonkeyPatch):
    registry = full_decode_registry()
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, _: copied.extend(to))
    own = registry.get_slot("input_ids").slice_for(4, 4)
    registry.copy_slots({"input_ids": own, "positions": numbers(4)})
    assert [tensor.data_ptr() for tensor in copied] == [
        registry.get_slot("positions").slice_for(1, 1).data_ptr()
    ]


def test_copy_slots_names_a_slot_that_it_cannot_fill():
    registry = make_registry(bs_slot("x"), bs_slot("off", enabled=False))
    with pytest.raises(KeyError, match="'y' is not registered"):
        registry.copy_slots({"y": numbers(1)})
    with pytest.raises(RuntimeError, match="slot 'off' has no buffer: it is disabled"):
        registry.copy_slots({"off": numbers(1)})
    with pytest.raises(ValueError, match="slot 'x': the source has shape"):
        registry.copy_slots({"x": numbers(2, 2)})


def test_counts_bound_from_one_tensor_leave_its_other_rows_alone():
    whole = torch.full((5,), -1, dtype=torch.int32)
    source = SimpleNamespace(
        **bound_buffers(),
        global_num_tokens_gpu=whole[0:1],
        global_num_tokens_for_logprob_gpu=whole[3:4],
    )
    registry = decode_registry(source=source, require_gathered_buffer=True)
    fill(registry, full_batch(3), 3, 4)
    assert whole.tolist() == [4, -1, -1, 4, -1]
