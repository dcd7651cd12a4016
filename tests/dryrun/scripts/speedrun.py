"""A GPT trained as in speed records: compiled whole, flex attention over documents, a head in FP8 that is its own operator,
matrices orthogonalised by a compiled function, the rest by an optimizer whose step is compiled, gradients reduced and
weights gathered by collectives that are waited for later. Tokens come from files with a header."""

import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

width, layers, heads, vocabulary, length = 256, 2, 2, 4096, 1024
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group(backend="nccl", device_id=device)


@torch.library.custom_op("speedrun::mm", mutates_args=())
def mm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    @torch.compile
    def impl(x: Tensor, w: Tensor):
        x_f8, w_f8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        one = x.new_tensor(1.0, dtype=torch.float32)
        return torch._scaled_mm(x_f8, w_f8.T, out_dtype=torch.bfloat16, scale_a=one, scale_b=one), x_f8, w_f8

    return impl(x, w)


@mm.register_fake
def _(x: Tensor, w: Tensor):
    return x @ w.T, x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)


@torch.library.custom_op("speedrun::mm_backward", mutates_args=())
def mm_backward(g: Tensor, x_f8: Tensor, w_f8: Tensor) -> tuple[Tensor, Tensor]:
    @torch.compile
    def impl(g: Tensor, x_f8: Tensor, w_f8: Tensor):
        one = g.new_tensor(1.0, dtype=torch.float32)
        g_f8 = g.to(torch.float8_e5m2)
        grad_x = torch._scaled_mm(g_f8, w_f8.T.contiguous().T, out_dtype=torch.bfloat16, scale_a=one, scale_b=one)
        x_t, g_t = x_f8.T.contiguous(), g_f8.T.contiguous().T
        return grad_x, torch._scaled_mm(x_t, g_t, out_dtype=torch.float32, scale_a=one, scale_b=one).T

    return impl(g, x_f8, w_f8)


@mm_backward.register_fake
def _(g: Tensor, x_f8: Tensor, w_f8: Tensor):
    return x_f8.to(torch.bfloat16), w_f8.T.contiguous().T.to(torch.float32)


def save(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


mm.register_autograd(lambda ctx, g, *_: torch.ops.speedrun.mm_backward(g, *ctx.saved_tensors), setup_context=save)


@torch.compile
def orthogonal(g: Tensor) -> Tensor:
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(2):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params):
        shapes = {p.shape: None for p in params}
        super().__init__([{"params": [p for p in params if p.shape == shape]} for shape in shapes], {"lr": 0.02})

    @torch.no_grad()
    def step(self):
        handles = []
        for group in self.param_groups:
            params = group["params"]
            padded = [p.grad for p in params] + [torch.zeros_like(params[-1])] * world_size
            for base in range(0, len(params), world_size):
                own = params[base + rank].grad if base + rank < len(params) else torch.empty_like(params[-1])
                handles.append(dist.reduce_scatter(own, padded[base : base + world_size], async_op=True).get_future())
        gathered, handles = [], iter(handles)
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * world_size
            for base in range(0, len(params), world_size):
                next(handles).wait()
                if base + rank < len(params):
                    p = params[base + rank]
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p.grad)
                    state["momentum_buffer"].lerp_(p.grad, 0.05)
                    p.add_(orthogonal(p.grad.lerp_(state["momentum_buffer"], 0.95).bfloat16()), alpha=-group["lr"])
                work = dist.all_gather(padded[base : base + world_size], padded[base + rank], async_op=True)
                gathered.append(work.get_future())
        torch.futures.collect_all(gathered).wait()


class DistAdam(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(list(params), {"lr": 0.01})

    @torch.compile
    @torch.no_grad()
    def step(self):
        slices, handles, gathered = [], [], []
        for p in self.param_groups[0]["params"]:
            part = torch.empty_like(p.grad[: p.shape[0] // world_size])
            handles.append(dist.reduce_scatter_tensor(part, p.grad, op=dist.ReduceOp.AVG, async_op=True).get_future())
            slices.append(part)
        for p, g, handle in zip(self.param_groups[0]["params"], slices, handles, strict=True):
            handle.wait()
            rows = p.shape[0] // world_size
            p_slice = p[rank * rows : (rank + 1) * rows]
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0, dtype=torch.int64, device=p.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p_slice), torch.zeros_like(p_slice)
            state["step"] += 1
            p_slice.mul_(1 - 0.01 * self.param_groups[0]["lr"])
            state["exp_avg"].mul_(0.8).add_(g, alpha=0.2)
            state["exp_avg_sq"].mul_(0.95).addcmul_(g, g, value=0.05)
            bias = torch.sqrt(1 - 0.95 ** state["step"]) / (1 - 0.8 ** state["step"])
            p_slice.add_(state["exp_avg"].div(state["exp_avg_sq"].sqrt().add_(1e-10)).mul_(bias), alpha=-1.0)
            gathered.append(dist.all_gather_into_tensor(p, p_slice, async_op=True).get_future())
        torch.futures.collect_all(gathered).wait()


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(3 * width, width).uniform_(-0.05, 0.05))
        self.proj = nn.Parameter(torch.zeros(width, width))
        self.up, self.down = nn.Parameter(torch.zeros(4 * width, width)), nn.Parameter(torch.zeros(width, 4 * width))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = F.linear(norm(x), self.qkv.bfloat16()).view(1, -1, 3 * heads, width // heads).transpose(1, 2).chunk(3, 1)
        y = flex_attention(norm(q), norm(k), v, block_mask=mask).transpose(1, 2).flatten(2)
        x = x + F.linear(y, self.proj.bfloat16())
        return x + F.linear(F.relu(F.linear(norm(x), self.up.bfloat16())).square(), self.down.bfloat16())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.lm_head = nn.Parameter(torch.zeros(vocabulary, width))

    def mask(self, tokens: Tensor) -> BlockMask:
        documents = (tokens == 50256).cumsum(0)

        def same_document(b, h, q, kv):
            return (q >= kv) & (documents[q] == documents[kv])

        blocks = torch.arange(len(tokens) // 128, dtype=torch.int32, device="cuda")
        low, high = documents.view(-1, 128)[:, 0].contiguous(), documents.view(-1, 128)[:, -1].contiguous()
        some = (blocks[:, None] >= blocks) & (low[:, None] <= high) & (high[:, None] >= low)
        counts = some.sum(dim=-1, dtype=torch.int32)[None, None].contiguous()
        order = some.argsort(dim=-1, stable=True).flip(-1).to(torch.int32)[None, None].contiguous()
        return BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=128, mask_mod=same_document)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask = self.mask(tokens)
        x = norm(self.embed(tokens)[None])
        for block in self.blocks:
            x = block(x, mask)
        x = norm(x).flatten(0, 1)
        logits = torch.ops.speedrun.mm(x, self.lm_head)[0] if self.training else F.linear(x, self.lm_head.bfloat16())
        return F.cross_entropy(15 * torch.tanh(logits.float() / 15), targets)


def batches(pattern: str):
    file = sorted(glob.glob(pattern))[0]
    header = torch.from_file(file, False, 256, dtype=torch.int32)
    assert header[0] == 20240520, "magic number mismatch in the data .bin file"
    with open(file, "rb", buffering=0) as f:
        tokens = torch.empty(int(header[2]), dtype=torch.uint16, pin_memory=True)
        f.seek(256 * 4)
        assert f.readinto(tokens.numpy()) == 2 * len(tokens)
    assert (tokens == 50256).any()
    for position in range(rank * length, len(tokens), world_size * length):
        row = tokens[position : position + length + 1]
        yield row[:-1].to("cuda", torch.int32, non_blocking=True), row[1:].to("cuda", torch.int64, non_blocking=True)


model = GPT().cuda()
model.embed.bfloat16()
for p in model.parameters():
    dist.broadcast(p.detach(), 0)
matrices = list(model.blocks.parameters())
optimizers = [DistAdam([model.embed.weight, model.lm_head]), Muon(matrices)]
model = torch.compile(model, dynamic=False)
train, validation = batches("data/train_*.bin"), batches("data/val_*.bin")
for step in range(100):
    if step % 50 == 0:
        model.eval()
        with torch.no_grad():
            loss = sum(model(*next(validation)) for _ in range(2)) / 2
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        print(f"validation {loss:.4f}")
        model.train()
    model(*next(train)).backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
print(f"peak memory allocated: {torch.cuda.max_memory_allocated() // 1024 // 1024} MiB")
dist.destroy_process_group()
