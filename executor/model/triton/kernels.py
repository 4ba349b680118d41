"""Source of the kernels; ``operators.py`` says what they do. Needs Triton, which compiles or interprets it."""

import triton
import triton.language as tl


@triton.jit
def look_up_pages(
    table,
    rows,
    indptr,
    firsts,
    out,
    row_stride,
    HAS_FIRSTS: tl.constexpr,
    SPAN: tl.constexpr,
):
    sequence = tl.program_id(0)
    begin = tl.load(indptr + sequence)
    place = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    is_page = place < tl.load(indptr + sequence + 1) - begin
    column = place
    if HAS_FIRSTS:
        column += tl.load(firsts + sequence)
    row = tl.load(rows + sequence)
    pages = tl.load(table + row * row_stride + column, mask=is_page)
    tl.store(out + begin + place, pages, mask=is_page)


@triton.jit
def choose_experts(
    logits,
    is_padding,
    ids,
    weights,
    num_experts,
    factor,
    HAS_PADDING: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0)
    expert, place = tl.arange(0, SPAN), tl.arange(0, PLACES)
    is_expert = expert < num_experts
    left = tl.load(logits + row * num_experts + expert, mask=is_expert, other=-float("inf"))
    left = left.to(tl.float32)
    chosen = tl.full([PLACES], -float("inf"), tl.float32)
    chosen_ids = tl.full([PLACES], 0, tl.int32)
    for k in tl.static_range(TOP_K):
        best, at = tl.max(left, axis=0, return_indices=True)
        chosen = tl.where(place == k, best, chosen)
        chosen_ids = tl.where(place == k, tl.minimum(at, num_experts - 1), chosen_ids)
        left = tl.where(expert == at, -float("inf"), left)
    shares = tl.exp(chosen - tl.max(chosen, axis=0))
    shares = shares / tl.sum(shares, axis=0) * factor
    if HAS_PADDING:
        chosen_ids = tl.where(tl.load(is_padding + row), num_experts, chosen_ids)
    is_place = place < TOP_K
    tl.store(ids + row * TOP_K + place, chosen_ids, mask=is_place)
    tl.store(weights + row * TOP_K + place, shares, mask=is_place)


@triton.jit
def store_heads(
    heads,
    weight,
    positions,
    turns,
    slots,
    queries,
    keys,
    values,
    row_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SPAN: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, SPAN)
    is_inside = column < WIDTH
    source = heads + row * row_stride + head * WIDTH
    dtype = heads.dtype.element_ty
    if head >= NUM_HEADS + NUM_KV_HEADS:
        value = tl.load(source + column, mask=is_inside)
        of_value = tl.load(slots + row) * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS
        tl.store(values + of_value * WIDTH + column, value, mask=is_inside)
    else:
        x = tl.load(source + column, mask=is_inside, other=0.0).to(tl.float32)
        is_first, is_turned = column < HALF, column < 2 * HALF
        partner = tl.where(is_first, column + HALF, column - HALF)
        y = tl.load(source + partner, mask=is_turned, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
            of_head = weight + head * WIDTH
            w = tl.load(of_head + column, mask=is_inside, other=0.0).to(tl.float32)
            w_of_y = tl.load(of_head + partner, mask=is_turned, other=0.0).to(tl.float32)
            # Rounded in between, as prompts have it, whose keys these stand beside.
            x = (x * scale * w).to(dtype).to(tl.float32)
            y = (y * scale * w_of_y).to(dtype).to(tl.float32)
        if HALF > 0:
            angle = tl.where(is_first, column, column - HALF)
            angles = turns + tl.load(positions + row) * (2 * HALF) + angle
            cos = tl.load(angles, mask=is_turned, other=1.0)
            sin = tl.load(angles + HALF, mask=is_turned, other=0.0)
            x = x * cos + tl.where(is_first, -y, y) * sin
        if head < NUM_HEADS:
            target = queries + (row * NUM_HEADS + head) * WIDTH
            tl.store(target + column, x.to(dtype), mask=is_inside)
        else:
            place = tl.load(slots + row) * NUM_KV_HEADS + head - NUM_HEADS
            tl.store(keys + place * WIDTH + column, x.to(dtype), mask=is_inside)


@triton.jit
def store_latents(
    q,
    latents,
    weight,
    positions,
    turns,
    slots,
    queries,
    cache,
    q_row_stride,
    q_head_stride,
    latent_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    LATENT_SPAN: tl.constexpr,
    HALF_SPAN: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = LATENT + 2 * HALF
    if head < NUM_HEADS:
        source = q + row * q_row_stride + head * q_head_stride
        target = queries + (row * NUM_HEADS + head) * width + LATENT
    else:
        whole = latents + row * latent_stride
        stored = cache + tl.load(slots + row) * width
        source, target = whole + LATENT, stored + LATENT
        column = tl.arange(0, LATENT_SPAN)
        is_inside = column < LATENT
        x = tl.load(whole + column, mask=is_inside, other=0.0).to(tl.float32)
        w = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / LATENT + eps)
        tl.store(stored + column, (x * scale * w).to(cache.dtype.element_ty), mask=is_inside)
    i = tl.arange(0, HALF_SPAN)
    is_turned = i < HALF
    angles = turns + tl.load(positions + row) * (2 * HALF) + i
    cos = tl.load(angles, mask=is_turned, other=1.0)
    sin = tl.load(angles + HALF, mask=is_turned, other=0.0)
    first = tl.load(source + i, mask=is_turned, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + i, mask=is_turned, other=0.0).to(tl.float32)
    dtype = queries.dtype.element_ty
    tl.store(target + i, (first * cos - second * sin).to(dtype), mask=is_turned)
    tl.store(target + HALF + i, (second * cos + first * sin).to(dtype), mask=is_turned)


@triton.jit
def add_sinks(
    out,
    lse,
    sinks,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SPAN)
    is_inside = column < WIDTH
    x = tl.load(out + head * WIDTH + column, mask=is_inside, other=0.0)
    # lse is to base 2.
    share = tl.sigmoid(tl.load(lse + head) * 0.6931471805599453 - tl.load(sinks + head % NUM_HEADS))
    tl.store(out + head * WIDTH + column, (x.to(tl.float32) * share).to(x.dtype), mask=is_inside)
