"""A program in the manner of Tinker's cookbook, with the import changed: GRPO with importance sampling and LoRA.

The reward is the share of sevens in an answer, which a model with random weights finds at once.
"""

from rlcore.compat import tinker  # import tinker
from rlcore.compat.tinker import types  # from tinker import types
from rlcore.quickstart.model import quickstart_model

PROMPTS = ["12+34=", "56+78=", "90+12=", "34+56="]
SAMPLES = 16


def main(num_steps: int = 12) -> list[float]:
    model = str(quickstart_model(seed=0))  # a folder; with Tinker the name of a model
    with tinker.ServiceClient() as service:
        training = service.create_lora_training_client(base_model=model, rank=8, seed=0).result()
        tokenizer = training.get_tokenizer()
        rewards = []
        for step in range(num_steps):
            sampling = training.save_weights_and_get_sampling_client(name=f"step-{step}").result()
            prompts = [tokenizer.encode(text) for text in PROMPTS]
            params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=step)
            # All are asked at once, and then waited for.
            answers = [sampling.sample(types.ModelInput.from_ints(tokens), SAMPLES, params) for tokens in prompts]
            data, total = [], 0.0
            for tokens, answer in zip(prompts, answers, strict=True):
                sequences = answer.result().sequences
                group = [tokenizer.decode(one.tokens).count("7") / 4 for one in sequences]
                mean = sum(group) / SAMPLES
                total += mean / len(prompts)
                data += [datum(tokens, one, reward - mean) for one, reward in zip(sequences, group, strict=True)]
            # Both calls go out before the first has ended.
            gradients = training.forward_backward(data, loss_fn="importance_sampling")
            update = training.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
            loss, norm = gradients.result().metrics["loss:sum"], update.result().metrics["grad_norm"]
            print(f"step {step:2}  reward {total:.3f}  loss {loss:7.3f}  gradient {norm:.2f}")
            rewards.append(total)
    return rewards


def datum(prompt: list[int], sampled: types.SampledSequence, advantage: float) -> types.Datum:
    """Return a sequence whose sampled tokens have this advantage; targets are the tokens that follow."""
    given = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *sampled.tokens][:-1]),
        loss_fn_inputs={
            "target_tokens": [*prompt[1:], *sampled.tokens],
            "logprobs": [*given, *sampled.logprobs],
            "advantages": [*given, *[advantage] * len(sampled.tokens)],
        },
    )


if __name__ == "__main__":
    main()
