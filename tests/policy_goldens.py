"""What TRL computes through a model that transformers reads: tests/goldens/policy.

`python tests/policy_goldens.py model` writes a model folder of ours there. `python tests/policy_goldens.py losses`,
where torch, transformers and trl are installed, writes answers.json (what goes in: answers to prompts with old,
reference and the sampler's log-probabilities; of each case our keys of [rl], and the loss) and of each case
NAME.safetensors, the gradient of every weight. GRPOTrainer._compute_loss is called without a trainer, in float64, on
whole logits of an answer at a time. Made with trl 1.16.0, transformers 5.24.0 and torch 2.14.1; the tests need none of
them.
"""
import collections
import json
import sys
import types
from pathlib import Path

HOME = Path(__file__).resolve().parent / "goldens" / "policy"
MODEL = dict(vocab_size=61, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24,
             compute_dtype="float32")
LONGEST, LENGTHS = 9, (3, 1, 6, 4, 2, 7, 5, 1)
# name: ([rl], what TRL calls it)
CASES = {
    "dapo": (dict(temperature=0.7, clip_high=0.28, entropy=0.05, old="trainer", kl=0.1, correction="token_truncate",
                  correction_limit=1.2), dict(loss_type="dapo", epsilon_high=0.28)),
    "dr_grpo": (dict(temperature=0.7, aggregate="constant"), dict(loss_type="dr_grpo")),
    "gspo": (dict(temperature=1.3, aggregate="sequence", ratio="sequence", clip_low=0.1, clip_high=0.1, old="trainer",
                  kl=0.1, kl_form="k3_corrected"),
             dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.1, epsilon_high=0.1)),
    "cispo": (dict(ratio="cispo", clip_high=0.1, old="trainer"), dict(loss_type="cispo", epsilon_high=1.1)),
}


def write_model() -> None:
    import jax
    import parity
    from test_layouts import ONE, run_of

    from meshtrain.huggingface.weights import export
    from meshtrain.huggingface.weights.ends import Ends
    from meshtrain.run import trees
    made = parity.assemble(run_of("ddp", ONE, MODEL))
    grown = jax.tree.map(lambda w: 2 * w, parity.draw_parameters(made, 0))     # so that ratios and temperatures show
    params = jax.device_put(grown, made.program.step.state.sharding.params)
    with jax.set_mesh(made.mesh):
        export.write(HOME, made.model, trees.leaves_of(params).__getitem__, dtype="float32", shard_bytes=10**9,
                     data={"seq_len": 64, "tokenizer": "bytes"}, ends=Ends((1,), bos=1), source=None)


def write_losses() -> None:
    import torch
    import transformers
    from safetensors.torch import save_file
    from trl import GRPOTrainer
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = transformers.AutoModelForCausalLM.from_pretrained(HOME, dtype=torch.float64, attn_implementation="eager")
    rows, most = len(LENGTHS), max(LENGTHS)
    prompts = [torch.randint(0, 61, (1 + i % 3,)) for i in range(rows)]
    tokens = [torch.randint(0, 61, (n,)) for n in LENGTHS]
    drawn = (torch.arange(most) < torch.tensor(LENGTHS)[:, None]).double()
    padded = lambda parts: torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def scores(temperature: float):
        logps, entropies = [], []
        for before, answer in zip(prompts, tokens, strict=True):
            logits = model(torch.cat([before, answer])[None]).logits[0, len(before) - 1:-1]
            log_p = (logits / temperature).log_softmax(-1)
            logps.append(log_p.gather(-1, answer[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        return padded(logps), padded(entropies)

    advantages, noise = torch.randn(rows), [torch.randn(rows, most) for _ in range(3)]
    answers = [dict(prompt=before.tolist(), tokens=answer.tolist(), advantage=advantage)
               for before, answer, advantage in zip(prompts, tokens, advantages.tolist(), strict=True)]
    cases = {}
    for name, (rl, theirs) in CASES.items():
        with torch.no_grad():
            now = scores(rl.get("temperature", 1.0))[0]
        old = (now + 0.3 * noise[0]).float().double()
        sampled, reference = (old + 0.2 * noise[1]).float().double(), (now + 0.4 * noise[2]).float().double()
        weight = (old - sampled).exp().clamp(max=rl.get("correction_limit", 2.0))
        corrected, entropy = "correction" in rl, rl.get("entropy", 0.0)
        trainer = types.SimpleNamespace(**dict(
            importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2) | theirs, beta=rl.get("kl", 0.0),
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=corrected,
            vllm_importance_sampling_correction=corrected, aux_loss_enabled=False, use_adaptive_entropy=False,
            _entropy_bonus_enabled=entropy > 0, entropy_coef=entropy, max_completion_length=LONGEST,
            current_gradient_accumulation_steps=1,
            _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
            args=types.SimpleNamespace(delta=None, use_bias_correction_kl=rl.get("kl_form") == "k3_corrected",
                                       steps_per_generation=1),
            accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                                              sync_gradients=True),
            model=types.SimpleNamespace(training=True),
            _get_per_token_logps_and_entropies=lambda *_, temperature=rl.get("temperature", 1.0), **__: (
                *scores(temperature), None))
        inputs = dict(prompt_ids=padded(prompts), prompt_mask=padded(prompts), completion_ids=padded(tokens),
                      completion_mask=drawn, advantages=advantages, ref_per_token_logps=reference,
                      num_items_in_batch=drawn.sum(), importance_sampling_ratio=weight)
        if "old" in rl:
            inputs["old_per_token_logps"] = old
        model.zero_grad()
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        loss.backward()
        cut = lambda x: [x[i, :n].tolist() for i, n in enumerate(LENGTHS)]
        cases[name] = dict(rl=rl, loss=float(loss.detach()), old=cut(old), sampled=cut(sampled),
                           reference=cut(reference))
        save_file({name: weight.grad.float().contiguous() for name, weight in model.named_parameters()},
                  HOME / f"{name}.safetensors")
        print(f"{name:8} {loss.item():+.9f}")
    (HOME / "answers.json").write_text(json.dumps(dict(answers=answers, cases=cases)))


if __name__ == "__main__":
    {"model": write_model, "losses": write_losses}[sys.argv[1]]()
