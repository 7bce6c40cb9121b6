"""rlcore's device, loss and offload around a torch module of your own: no engine, no transformers."""

import torch

import rlcore
from rlcore.ops import linear_logprob, linear_loss, ppo_clip

device = rlcore.get_device()  # the GPU if there is one; rlcore.get_device("cuda:1") is that one or an error
hidden_size, vocab_size, num_tokens = 256, 32_000, 512
body = torch.nn.Sequential(torch.nn.Embedding(vocab_size, hidden_size), torch.nn.Linear(hidden_size, hidden_size))
head = torch.nn.Linear(hidden_size, vocab_size)
model = torch.nn.ModuleDict({"body": body, "head": head}).to(device.torch_device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

tokens = torch.randint(vocab_size, (num_tokens + 1,), device=device.torch_device)
inputs, targets, weight, bias = tokens[:-1], tokens[1:], head.weight, head.bias
with torch.no_grad():
    old_logprobs = linear_logprob(body(inputs), weight, targets, bias=bias).logprob
advantages = torch.randn(num_tokens, device=device.torch_device)
uniform = torch.full((num_tokens,), 1 / num_tokens, device=device.torch_device)

for step in range(3):  # the logits, tokens x vocabulary, are never held whole, forward or backward
    per_token = {"old_logprobs": old_logprobs, "advantages": advantages}
    hidden = body(inputs)
    result = linear_loss(hidden, weight, targets, ppo_clip(), per_token=per_token, token_weight=uniform, bias=bias)
    result.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {result.loss.item():+.4f}  entropy {result.stats['entropy_mean'].item():.2f}")

with rlcore.offloaded(model, optimizer) as report:
    print(f"{report.freed_device_bytes / 1e6:.0f} MB of {device.name} are free for somebody else")
