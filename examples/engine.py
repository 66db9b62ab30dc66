"""A small inference engine on tkv's paged cache: continuous batching, chunked prefill, prefix cache, preemption, speculative decoding.

    python examples/engine.py
    python examples/engine.py --requests 5 --pages 8 --speculate 0
    python examples/engine.py --format int8/token_head

Requests come in over time. Each step of `Engine` runs one batch, in which some sequences are at a chunk of their prompts and others decode:

1. admit:    waiting requests join, the oldest first, while there are pages for them: `CacheManager.add` finds what the cache has of their
             prompts already, `CacheManager.missing` tells how many pages all that run would take.
2. schedule: every sequence gets its tokens that are not in the cache yet, of prompts at most `chunk` a step, and behind them a few drafts:
             what followed the last time that the newest two tokens came (prompt lookup). `CacheManager.step` hands out their slots. If it
             raises `OutOfPages`, nothing has changed: drafts are given up first, then the youngest sequence, which waits again.
3. compute:  in each layer copy the pages that are written and were shared, write the new keys and values, attend. Nothing is read back
             from the device but, at the end, the likeliest tokens.
4. accept:   drafts stay as long as they are what the model says; `CacheManager.truncate` cuts off the rest, of all sequences at once.

There are no phases: a prompt, a sequence that was preempted and one that decodes all have tokens that are not in the cache, many or one.

The model is a small random Llama, all is greedy, and each output is compared to that of a plain loop without any cache. Left out: sampling,
stop tokens, streaming, CUDA graphs.
"""

from __future__ import annotations

import argparse
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import tkv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16
DIM, VOCAB = HEADS * HEAD_DIM, 64
PAGE_SIZE = 8


@dataclass
class Request:
    """A prompt, how many tokens are wanted, and what has become of it."""

    prompt: list[int]
    max_new: int
    arrival: int = 0  # the step before which it comes in
    tokens: list[int] = field(init=False)  # the prompt and what was generated
    seq: int = -1  # the manager's number of it, while it runs
    cached: int | None = None  # tokens of the prompt that were in the cache when it first ran
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    preempted: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def longest(self) -> int:
        return len(self.prompt) + self.max_new


@dataclass
class Work:
    """A request's part of a step: tokens that are new to the cache, the last of them drafts."""

    request: Request
    tokens: list[int]
    drafts: list[int]
    is_last: bool  # the request has no further tokens, so that the next one can be told


class Engine:
    """Serves requests from a cache of `num_pages` pages.

    Args:
        model: of tokens, positions, rows and a function that attends: see `Llama`.
        num_pages, format: of the cache of each layer.
        chunk: the most tokens of prompts in a step, all requests together.
        speculate: the most drafts of a request in a step; 0 for none.
    """

    def __init__(self, model: Llama, num_pages: int, format: str = "fp32", chunk: int = 16, speculate: int = 3) -> None:
        self.model, self.chunk, self.speculate = model, chunk, speculate
        self.caches = [tkv.KVCache.empty(num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, format, device=DEVICE) for _ in range(LAYERS)]
        self.manager = tkv.CacheManager(tkv.PagePool(num_pages), PAGE_SIZE)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first

    def submit(self, request: Request) -> None:
        if not request.prompt or request.max_new < 1:
            raise ValueError("a request needs a token to begin with and one to generate")
        needed, pages = pages_for(request.longest), self.manager.pool.num_pages
        if needed > pages:
            raise ValueError(f"a request of up to {request.longest} tokens needs {needed} pages, there are {pages}")
        self.waiting.append(request)

    def step(self) -> None:
        self.admit()
        work, batch = self.schedule()
        likeliest = iter(self.compute(work, batch))
        for part in work:
            part.request.steps += 1
            if part.is_last:
                self.accept(part, [next(likeliest) for _ in range(len(part.drafts) + 1)])
        # All tokens but the newest are in the cache, and drafts that were rejected.
        told = [part.request for part in work if part.is_last]
        self.manager.truncate([request.seq for request in told], [len(request.tokens) - 1 for request in told])
        done = [request for request in told if len(request.tokens) == request.longest]
        self.manager.free([request.seq for request in done])
        self.running = [request for request in self.running if request not in done]

    def admit(self) -> None:
        # A sequence holds the pages that `add` found: one that has to wait on is freed.
        while self.waiting:
            request = self.waiting[0]
            request.seq = self.manager.add(request.tokens)
            joined = [*self.running, request]
            if self.manager.missing([each.seq for each in joined], [self.soon(each) for each in joined]) > self.manager.num_available:
                self.manager.free(request.seq)
                return
            if request.cached is None:
                request.cached = self.manager.length(request.seq)
            self.running.append(self.waiting.popleft())

    def soon(self, request: Request) -> int:
        """Tokens of a sequence that are to come, and a page more of them: else it might be preempted at once."""
        return min(len(request.tokens) + PAGE_SIZE, request.longest) - self.manager.length(request.seq)

    def schedule(self) -> tuple[list[Work], tkv.pages.Batch]:
        """The work of a step that the pages are enough for, and its batch."""
        speculate = self.speculate
        while True:
            work = self.pick(speculate)
            try:
                return work, self.manager.step({part.request.seq: part.tokens for part in work})
            except tkv.errors.OutOfPages:
                if any(part.drafts for part in work):
                    speculate = 0
                else:
                    self.preempt(self.running.pop())

    def pick(self, speculate: int) -> list[Work]:
        """What each running sequence gets in a step; a prompt that finds the budget used up gets nothing."""
        work, budget = [], self.chunk
        for request in self.running:
            new = request.tokens[self.manager.length(request.seq) :]
            left = len(new)
            if left > 1:
                new = new[:budget]
                budget -= len(new)
            if new:
                is_last = len(new) == left
                # The last token that is wanted is never fed, so it need not be drafted.
                most = min(speculate, request.longest - len(request.tokens) - 1) if is_last else 0
                drafts = propose(request.tokens, most)
                work.append(Work(request, new + drafts, drafts, is_last))
        return work

    def preempt(self, request: Request) -> None:
        # Its pages stay cached until others need them: what is left of them is found when it is added again.
        self.manager.free(request.seq)
        request.preempted += 1
        self.waiting.appendleft(request)

    @torch.no_grad()
    def compute(self, work: list[Work], batch: tkv.pages.Batch) -> list[int]:
        """The likeliest token after the newest token of each sequence that is at its last one, and after each of its drafts."""
        ends = batch.cu_seqlens[1:].tolist()
        rows = [row for part, end in zip(work, ends) if part.is_last for row in range(end - len(part.drafts) - 1, end)]
        # To the device before the first launch, when there is nothing to wait for.
        b = batch.tensors(DEVICE)
        tokens = torch.tensor([token for part in work for token in part.tokens], device=DEVICE)
        rows_wanted = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
        # Equally many new tokens of each sequence, as when all decode.
        is_even = b.q_len is not None and b.q_len <= 64

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache = self.caches[layer]
            tkv.copy_pages(cache, cache, *b.copies.unbind(1))
            tkv.write_kv(k, v, cache, b.slot_mapping)
            if is_even:
                q = q.unflatten(0, (-1, b.q_len))
                return tkv.paged_decode(q, cache, b.page_table, b.seq_lens, max_seq_len=b.max_seq_len).flatten(0, 1)
            return tkv.prefix_prefill(
                q, None, None, cache, b.page_table, b.prefix_lens, b.cu_seqlens, max_q_len=b.max_q_len, max_seq_len=b.max_seq_len
            )

        return self.model(tokens, b.positions, rows_wanted, attend).argmax(-1).tolist()

    def accept(self, part: Work, likeliest: list[int]) -> None:
        """Keep the drafts that are what the model says, and what it says after them."""
        request, drafts = part.request, part.drafts
        good = next((i for i, draft in enumerate(drafts) if draft != likeliest[i]), len(drafts))
        request.drafted += len(drafts)
        request.accepted += good
        request.tokens += likeliest[: good + 1]


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def propose(tokens: list[int], count: int) -> list[int]:
    """Up to `count` drafts: what followed the newest two tokens when they came last before."""
    for end in range(len(tokens) - 1, 1, -1):
        if tokens[end - 2 : end] == tokens[-2:]:
            return tokens[end : end + count]
    return []


# Of the number of a layer, and its rotated q and k and its v, [tokens, heads, HEAD_DIM] each: the attention's output, like q.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A layer of a Llama: grouped attention with rotary positions, and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, heads * HEAD_DIM, bias=False) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.o, self.gate, self.up, self.down = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, number: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (project(h).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        x = x + self.o(attend(number, rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Of tokens and their positions, ``[tokens]`` each: the logits of the tokens that `rows` names. How to attend is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.1)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | slice, attend: Attend) -> torch.Tensor:
        angles = positions[:, None, None] * 1e4 ** (-torch.arange(0, HEAD_DIM, 2, device=positions.device) / HEAD_DIM)
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(number, x, angles.cos(), angles.sin(), attend)
        return self.head(self.norm(x[rows]))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@torch.no_grad()
def plain_output(model: Llama, prompt: list[int], max_new: int) -> list[int]:
    """The same by torch alone, all tokens anew for each token."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    tokens = list(prompt)
    for _ in range(max_new):
        positions = torch.arange(len(tokens), device=DEVICE)
        tokens.append(int(model(torch.tensor(tokens, device=DEVICE), positions, slice(-1, None), attend).argmax()))
    return tokens[len(prompt) :]


def make_requests(count: int) -> list[Request]:
    """Prompts with the same beginning, as of a system prompt, and ends of different lengths; a new one every second step."""
    text = torch.randint(VOCAB, (21 + count * 15,), generator=torch.Generator().manual_seed(1)).tolist()
    return [Request(text[:21] + text[21 + 15 * i :][: 5 + i * 7 % 11], max_new=10 + i % 3, arrival=2 * i) for i in range(count)]


def serve(engine: Engine, requests: Sequence[Request]) -> int:
    """Submit each request at its time, and run until all are done; returns the number of steps."""
    coming, step = deque(requests), 0
    while coming or engine.waiting or engine.running:
        while coming and coming[0].arrival <= step:
            engine.submit(coming.popleft())
        if engine.waiting or engine.running:
            engine.step()
        step += 1
    return step


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all tokens are those of the plain loop, or the cache is not float32."""
    parser = argparse.ArgumentParser(description="A small inference engine on tkv's paged cache.")
    parser.add_argument("--requests", type=int, default=4, help="how many come in (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=32, help=f"of {PAGE_SIZE} tokens, in each layer's cache (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=16, help="most prompt tokens in a step (default: %(default)s)")
    parser.add_argument("--speculate", type=int, default=3, help="most drafts of a request in a step (default: %(default)s)")
    parser.add_argument("--format", default="fp32", help="of the cache, such as int8/token_head (default: %(default)s)")
    args = parser.parse_args(argv)
    if min(args.requests, args.pages, args.chunk) < 1 or args.speculate < 0:
        parser.error("--requests, --pages and --chunk are 1 or more, --speculate is 0 or more")

    torch.manual_seed(3)
    model, requests = Llama().to(DEVICE), make_requests(args.requests)
    try:
        engine = Engine(model, args.pages, args.format, args.chunk, args.speculate)
    except tkv.errors.TkvError as error:
        parser.error(f"--format: {error}")
    steps = serve(engine, requests)

    rows, same = [], True
    for number, request in enumerate(requests):
        plain = plain_output(model, request.prompt, request.max_new)
        same &= request.output == plain
        equal = f"{sum(a == b for a, b in zip(request.output, plain))} of {len(plain)}"
        drafts = f"{request.accepted} of {request.drafted}"
        rows.append((number, len(request.prompt), request.cached, drafts, request.steps, request.preempted, equal))
    headers = ["request", "prompt tokens", "of them cached", "drafts accepted", "steps", "preempted", "tokens equal"]
    print(tabulate(rows, headers, disable_numparse=True, colalign=["right"] * len(headers)))
    stats = engine.manager.stats()
    print(f"{steps} steps; pages: {stats.copies} copied on write, {stats.evictions} cached ones given up; {args.format} cache on {DEVICE}")
    return 0 if same or args.format != "fp32" else 1


if __name__ == "__main__":
    raise SystemExit(main())
