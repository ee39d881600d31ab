"""Every command, asked for what cannot be: one message that names the value and the remedy, its exit code, and nothing
written.

A row is what somebody types in a directory with a finished run (`run`), a model folder (`hf`), and files that are
empty, damaged, of another kind or none at all; `world` says what stands there. To try another mistake, add a row.
"""
import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import RULES, Ran, call, home, limited, refused, tiny  # noqa: F401
from folders import GOLDENS

from meshtrain.launch import elastic as launch_elastic
from meshtrain.launch import local, pod, restart
from meshtrain.launch import ray as launch_ray
from meshtrain.commands import check, convert, evaluate, generate, inspect, plan, report, tokenize, train

LIMIT_S = 20        # a mistake is told within milliseconds, on a loaded machine within a second or two
MAINS = {"train": train.main, "generate": generate.main, "evaluate": evaluate.main, "convert": convert.main,
         "inspect": inspect.main,
         "plan": plan.main, "tokenize": tokenize.main, "report": report.main, "meshtrain.launch.local": local.main,
         "meshtrain.launch.pod": pod.main,
         "meshtrain.launch.ray": launch_ray.main, "meshtrain.launch.elastic": launch_elastic.main, "meshtrain.launch.restart": restart.main}

LONG = "x" * 300
PLACE = ("--distributed.num_processes 2 --distributed.process_id 0 "
         "--distributed.coordinator_address a:12345")

# command: (words, what the message must have), …
ROWS = {
    "train": [
        ("nowhere.toml", "there is no such run file", "configs/quickstart.toml"),
        ("'a b/nowhere.toml'", "a b/nowhere.toml", "no such run file"),
        ("folder", "folder is a directory"),
        ("run", "run is a directory"),
        ("run/metrics.jsonl", "metrics.jsonl"),
        ("hf/model.safetensors", "model.safetensors", "UTF-8"),
        ("latin1.toml", "latin1.toml", "UTF-8"),
        ("utf16.toml", "utf16.toml", "UTF-8"),
        ("nul.toml", "nul.toml"),
        ("half.toml", "half.toml", "at end of document"),
        ("list.json", "list.json"),
        ("loop.toml", "loop.toml"),
        ("dangling.toml", "dangling.toml", "no such run file"),
        ("/dev/null/x.toml", "/dev/null/x.toml"),
        ("''", "run file"),
        ("text.txt/run.toml", "text.txt/run.toml"),
        ("sound.toml half.toml", "half.toml is a second run file in addition to sound.toml"),
        ("'é.toml'", "é.toml", "no such run file"),
        ("'-'", "-"),
        ("--", "--"),
        ("--training.steps", "--training.steps", "--training.steps=VALUE"),
        ("--training.steps=", "training.steps"),
        ("--training.steps 3 --training.steps", "--training.steps"),
        ("--training.steps ٣", "training.steps"),
        ("--training.steps -3", "training.steps=-3", "at least 1"),
        ("--training.steps 1e3", "training.steps=1000.0", "whole number"),
        ("--training.steps 99999999999999999999999", "training.steps=99999999999999999999999", "less than 2147483648"),
        ("" + LONG + "", "name too long"),
        ("--optimizer.learning_rate inf", "optimizer.learning_rate=inf", "e.g. 0.0003"),
        ("--optimizer.learning_rate -0.0", "optimizer.learning_rate=-0.0", "more than 0"),
        ("--optimizer.learning_rate 1e-400", "optimizer.learning_rate=0.0", "more than 0"),
        ("--optimizer.b1 -0.1", "optimizer.b1=-0.1"),
        ("--training.grad_clip nan", "training.grad_clip"),
        ("--training.step_timeout_s -2", "training.step_timeout_s=-2"),
        ("--Training.Steps 3", "Training"),
        ("--lr 3e-4", "--lr is not an option; did you mean --optimizer.learning_rate?"),
        ("--training.batch-size 8", "training.batch-size", "did you mean data.global_batch?"),
        ("--mesh.tp 8", "did you mean mesh.tensor?"),
        ("--pipeline_model_parallel_size 4", "did you mean --mesh.stage?"),
        ("--model.hidden_size 64", "did you mean model.embed_dim?"),
        ("--mesh.ep 4", "did you mean sharding.rules?"),
        ("--training.steps.more 3", "training.steps.more"),
        ("--.steps 3", "there is no section []"),
        ("--training. 3", "training."),
        ("--modèle.steps 3", "modèle"),
        ("--help.me 1", "help"),
        ("--model.vocab_size 3000000000", "model.vocab_size=3000000000"),
        ("--model.num_layers 1000000000", "model.num_layers=1000000000", "at most 10000"),
        ("--model.num_experts 100000000", "TiB", "smaller model"),
        ("--model.num_experts 8 --model.router_groups [1000000000000,1]", "do not divide model.num_experts=8", "e.g. 8"),
        ("--mesh.simulated_devices 4097", "mesh.simulated_devices=4097", "4096"),
        ("--mesh.data 7", "mesh.data=7", "there are 8"),
        ("--data.global_batch 12 --mesh.data 8 --mesh.fsdp 1 --mesh.tensor 1", "batch=12", "data 8", "16"),
        ("--mesh.fsdp 1 --mesh.data 4 --mesh.stage 2 --mesh.tensor 1 --sharding.rules batch.toml", "mesh.stage=2",
         'layers = "stage"', "shipped rule files"),
        ("--mesh.fsdp 1 --mesh.data 4 --mesh.context 2 --mesh.tensor 1 --sharding.rules batch.toml", "mesh.context=2",
         'seq = "context"'),
        ("--mesh.fsdp 1 --mesh.data 4 --mesh.tensor 2 --sharding.rules batch.toml", "mesh.tensor=2", "batch.toml",
         "mesh.tensor to 1"),
        ("--data.seq_len 0", "data.seq_len=0"),
        ("--sharding.rules ''", "sharding.rules"),
        ("--sharding.rules folder", "folder"),
        ("--sharding.rules fifo", "fifo"),
        ("--sharding.rules empty.txt --mesh.data 8", "mesh.data"),
        ("--sharding.rules circle.toml", "circle.toml", "cannot extend itself"),
        ("--sharding.rules far.toml", "far.toml", "no such rule file"),
        ("--sharding.rules " + LONG, "sharding.rules"),
        ("--data.source text --data.paths '[\"" + LONG + "\"]'", "data.paths"),
        ("--data.tokenizer " + LONG + " --data.source text --data.paths '[\"text.txt\"]'", "data.tokenizer"),
        ("--data.cache " + LONG + " --data.source jsonl --data.paths '[\"other.jsonl\"]' --data.field body",
         "data.cache"),
        ("--data.source chat --data.chat_template " + LONG + " --data.paths '[\"other.jsonl\"]'", "chat_template"),
        ("--checkpoint.local_every 5 --checkpoint.local_dir " + LONG, "checkpoint.local_dir"),
        ("--sharding.rules latin1.toml", "latin1.toml", "UTF-8"),
        ("--run.dir text.txt", "text.txt is a file"),
        ("--run.dir text.txt/below", "text.txt/below"),
        ("--run.dir folder", "folder", "is not the directory of a run", "config.toml", "run.name"),
        ("--run.dir mine", "mine", "config.toml"),
        ("--run.dir hf", "hf", "is not the directory of a run"),
        ("--run.dir /proc/nowhere/run", "/proc/nowhere/run"),
        ("--run.dir " + LONG, "File name too long"),
        ("--run.dir new --run.sample_prompt " + LONG, "run.sample_prompt has 301 tokens", "data.seq_len=256"),
        ("--run.dir gs://bucket/run", "gs://bucket/run", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("--run.dir s3://", "run.dir", "names no bucket"),
        ("--run.dir gs:///", "run.dir", "names no bucket"),
        ("--run.dir ftp://host/run", "ftp://host/run"),
        ("--run.dir hf://owner/name", "hf://owner/name"),
        ("null.toml", "run.dir=", "null character"),
        ("--run.name ../up", 'run.name="../up"'),
        ("--run.name ''", "run.name"),
        ("--run.dir run --model.embed_dim 64", "model.embed_dim", "run.name"),
        ("--run.dir run --checkpoint.resume never", "run", "checkpoint.resume", "never", "run.name"),
        ("run/config.toml --run.dir run --checkpoint.step 7 --training.steps 9", "checkpoint.step=7"),
        ("--run.dir new --checkpoint.step 3", "checkpoint.step=3"),
        ("--run.dir new --checkpoint.init_from folder", "folder"),
        ("--run.dir new --checkpoint.init_from text.txt", "text.txt"),
        ("--run.dir new --checkpoint.init_from run --checkpoint.step 77", "77"),
        ("--run.dir new --checkpoint.init_from " + LONG, "init_from"),
        ("--run.dir new --checkpoint.init_from hf_empty", "hf_empty"),
        ("--checkpoint.local_every 5", "checkpoint.local_dir"),
        ("--checkpoint.local_every 5 --checkpoint.local_dir text.txt", "text.txt"),
        ("--checkpoint.keep 0", "checkpoint.keep=0"),
        ("--checkpoint.keep_every 750", "checkpoint.keep_every=750", "checkpoint.every=100", "e.g. 800"),
        ("--checkpoint.keep_every 50 --checkpoint.every 0", "checkpoint.keep_every=50", "checkpoint.every=0", "both 50"),
        ("--data.source text --data.paths '[\"nowhere/*.txt\"]'", "nowhere/*.txt"),
        ("--data.source text --data.paths '[\"\"]'", "data.paths"),
        ("--data.source text --data.paths '[\"folder\"]'", "folder"),
        ("--data.source text --data.paths '[\"empty.txt\"]'", "empty"),
        ("--data.source text --data.paths '[\"fifo\"]'", "fifo"),
        ("--data.source text --data.paths '[\"/dev/zero\"]'", "/dev/zero"),
        ("--data.source text --data.paths '[\"loop.toml\"]'", "loop.toml"),
        ("--data.source text --data.paths '[\"fake.txt.gz\"]'", "fake.txt.gz"),
        ("--data.source text --data.paths '[\"text.txt\", 3]'", "data.paths[1]=3"),
        ("--data.source jsonl --data.paths '[\"broken.jsonl\"]'", "broken.jsonl", "line 2"),
        ("--data.source jsonl --data.paths '[\"other.jsonl\"]'", "other.jsonl", "body"),
        ("--data.source jsonl --data.paths '[\"text.txt\"]'", "text.txt"),
        ("--data.source chat --data.paths '[\"other.jsonl\"]'", "data"),
        ("--data.source parquet --data.paths '[\"text.txt\"]'", "text.txt"),
        ("--data.source arrow --data.paths '[\"text.txt\"]'", "text.txt"),
        ("--data.source tokens --data.bos_token 0 --data.paths '[\"text.txt\"]'", "text.txt"),
        ("--data.source tokens --data.bos_token 0 --data.paths '[\"alone.tokens.npy\"]'", "alone"),
        ("--data.source tokens --data.paths '[\"alone.tokens.npy\"]'", "data.bos_token"),
        ("--data.source preferences --data.paths '[\"other.jsonl\"]'", "training.objective"),
        ("--data.paths '[\"text.txt\"'", "data.paths"),
        ("--data.tokenizer nowhere.json --data.source text --data.paths '[\"text.txt\"]'", "nowhere.json"),
        ("--data.tokenizer list.json --data.source text --data.paths '[\"text.txt\"]'", "list.json"),
        ("--data.tokenizer folder --data.source text --data.paths '[\"text.txt\"]'", "folder"),
        ("--data.seq_len 100000 --data.source text --data.paths '[\"text.txt\"]'", "data.seq_len=100000"),
        ("--data.validation_fraction 1", "data.validation_fraction=1"),
        ("--data.skip_batches -1", "data.skip_batches=-1"),
        ("--data.skip_batches 99999999999999999999999", "at most 1000000000"),
        ("--training.objective dpo", "dpo"),
        ("--lora.rank 4 --lora.targets '[\"nothing\"]'", "nothing"),
        ("--lora.rank -4", "lora.rank=-4"),
        ("--lora.rank 9223372036854775808", "lora.rank=9223372036854775808"),
        ("--metrics.profile_steps '[5, 3]'", "metrics.profile_steps"),
        ("--metrics.profile_steps '[1, 2, 3]'", "metrics.profile_steps"),
        ("--metrics.wandb offline", "metrics.wandb"),
        ("--metrics.prometheus 70000", "metrics.prometheus=70000"),
        ("--distributed.coordinator_address nowhere", "distributed"),
        ("--distributed.num_processes 2", "distributed"),
        ("--distributed.coordinator_address localhost:99999 --distributed.num_processes 2 --distributed.process_id 0",
         "99999"),
        ("--distributed.coordinator_address localhost:2000 --distributed.num_processes 2 --distributed.process_id 2",
         "process_id=2"),
        ("--json", "--json"),
        ("--training.steps 3 --quiet", "--quiet"),
    ],
    "generate": [
        ("", "RUN_DIR|HF_DIR is missing"),
        ("run", "--prompt"),
        ("run --prompt", "--prompt"),
        ("run --prompt ''", "--prompt has no value"),
        ("hf", "give one of --prompt"),
        ("run hf --prompt a", "2 names are given (run, hf)"),
        ("nowhere --prompt a", "nowhere is not a directory"),
        ("folder --prompt a", "neither config.json nor checkpoints/"),
        ("text.txt --prompt a", "text.txt"),
        ("fifo --prompt a", "fifo"),
        ("'' --prompt a", "'' names nothing"),
        (LONG + " --prompt a", "is not a directory"),
        ("run/checkpoints --prompt a", "run/checkpoints"),
        ("run/config.toml --prompt a", "run/config.toml"),
        ("hf --prompt a", "--prompt needs a tokenizer", "--prompt-ids"),
        ("hf --prompts none.txt", "--prompts needs a tokenizer"),
        ("hf --prompt-ids '[[5]]' --stop=a", "--stop needs a tokenizer"),
        ("hf --chat", "--chat needs a tokenizer"),
        ("hf --prompt-ids '[[5], [200], [-1]]'", "prompt 2 has the id 200", "0 to 199", "prompt 3 has the id -1"),
        ("hf --prompt-ids '[[5]]' --max-tokens=0 --temperature=-1 --top-p=1.5 --top-k=x --tempreature=1",
         "--max-tokens 0 is not", "--temperature -1 is not", "--top-p 1.5 is not", "--top-k x is not",
         "did you mean --temperature"),
        ("hf_empty --prompt-ids '[[1]]'", "hf_empty"),
        ("hf_list --prompt-ids '[[1]]'", "hf_list"),
        ("hf_unknown --prompt-ids '[[1]]'", "hf_unknown", "llamb"),
        ("hf_truncated --prompt-ids '[[1]]'", "hf_truncated"),
        ("hf_shape --prompt-ids '[[1]]'", "hf_shape"),
        ("hf_no_weights --prompt-ids '[[1]]'", "hf_no_weights"),
        ("run --prompt a --step 99", "--step 99 is not saved"),
        ("run --prompt a --step -1", "--step -1"),
        ("run --prompt a --step one", "--step one"),
        ("run --prompt a --step 1.0", "--step 1.0"),
        ("hf --prompt-ids '[[1]]' --step 3", "--step 3", "no steps"),
        ("run --prompt a --max-tokens 0", "--max-tokens 0"),
        ("run --prompt a --max-tokens nan", "--max-tokens nan"),
        ("run --prompt a --max-tokens 9999999999", "--max-tokens 9999999999"),
        ("run --prompt a --temperature -1", "--temperature -1"),
        ("run --prompt a --temperature nan", "--temperature nan"),
        ("run --prompt a --temperature warm", "--temperature warm"),
        ("run --prompt a --top-p 0", "--top-p 0"),
        ("run --prompt a --top-p 1.1", "--top-p 1.1"),
        ("run --prompt a --top-k 0", "--top-k 0"),
        ("run --prompt a --min-p inf", "--min-p inf"),
        ("run --prompt a --seed 4294967296", "--seed 4294967296"),
        ("run --prompt a --temprature 1", "--temprature", "--temperature"),
        ("run --prompt a --stop ''", "--stop"),
        ("run --prompt a --prompts empty.txt", "give one of --prompt"),
        ("run --prompts nowhere.txt", "nowhere.txt cannot be read"),
        ("run --prompts folder", "folder"),
        ("run --prompts empty.txt", "empty.txt is empty"),
        ("run --prompts blank.txt", "blank.txt is empty"),
        ("run --prompts " + LONG, "cannot be read"),
        ("run --prompts /dev/zero", "/dev/zero"),
        ("run --prompts bytes.bin", "bytes.bin", "UTF-8"),
        ("run --prompts other.jsonl", "other.jsonl", "line 1 is not"),
        ("run --prompts broken.jsonl", "broken.jsonl"),
        ("run --prompt-ids '[[1], [99999]]'", "has the id 99999"),
        ("run --prompt-ids '[[1.5]]'", "--prompt-ids", "not a list of lists"),
        ("run --prompt-ids '[[true]]'", "--prompt-ids"),
        ("run --prompt-ids '[[[1]]]'", "--prompt-ids"),
        ("run --prompt-ids '[]'", "--prompt-ids"),
        ("run --prompt-ids '[[]]'", "--prompt-ids", "empty prompt"),
        ("run --prompt-ids '5'", "--prompt-ids"),
        ("run --prompt-ids nonsense", "--prompt-ids nonsense"),
        ("run --prompt-ids '[[1e400]]'", "--prompt-ids"),
        ("run --chat --prompt-ids '[[1]]'", "give one of --prompt"),
        ("run --chat --json", "--chat --json has no prompts"),
        ("run --chat", "there is no chat template"),
        ("run --prompt a --mesh.simulated_devices 2", "simulated_devices"),
        ("run --prompt a --mesh.data 3", "mesh.data=3"),
        ("run --prompt a --mesh.stage 2", "mesh.stage=2 has no use here"),
        ("hf --prompt-ids '[[5]]' --samples 2", "--samples 2: at temperature 0 all answers", "--temperature 1"),
        ("hf --chat --samples 2", "--samples 2: --chat has one answer", "leave --samples out"),
        ("hf --prompt-ids '[[5]]' --samples 0", "--samples 0", "1"),
        ("hf --prompt-ids '[[5]]' --mesh.tensor=3 --mesh.data=1", "mesh.tensor=3 does not divide", "query heads",
         "use mesh.tensor=2"),
        ("run --prompt a --training.steps 3 --model.embed_dim 64", "training.steps has no effect",
         "model.embed_dim has no effect"),
        ("run --prompt a --data.tokenizer list.json", "list.json"),
        ("'hdfs://node/run' --prompt a", "hdfs://node/run", "use s3://"),
        ("run --json=yes --prompt a", "--json"),
    ],
    "evaluate": [
        ("", "RUN_DIR|HF_DIR is missing"),
        ("run hf", "2 names"),
        ("nowhere", "nowhere"),
        ("hf", "which has no documents to evaluate on"),
        ("run --limit 3 --num-fewshot 2", "--limit 3 is an option of --tasks",
         "--num-fewshot 2 is an option of --tasks"),
        ("run --add-bos", "--add-bos is an option of --tasks"),
        ("run --task=a", "did you mean --tasks"),
        ("run --tasks ,", "--tasks , names no task"),
        ("run --step x", "--step x"),
        ("run --step 99", "99"),
        ("run --limit -1 --tasks a", "--limit -1"),
        ("run --data.paths '[\"nowhere.txt\"]'", "nowhere.txt"),
        ("run --data.source jsonl --data.paths '[\"broken.jsonl\"]'", "broken.jsonl"),
        ("run --data.paths '[\"empty.txt\"]'", "empty"),
        ("run --data.sauce text", "data.sauce", "data.source"),
        ("run --data.seq_len 0", "data.seq_len=0"),
        ("run --optimizer.learning_rate=1", "optimizer.learning_rate has no effect here"),
        ("run --html page.html", "--html"),
        ("hf_truncated --data.source text --data.paths '[\"text.txt\"]'", "hf_truncated"),
        ("hf --data.source text --data.paths '[\"text.txt\"]'", "hf has no tokenizer.json", "or to bytes"),
        ("hf --data.source text --data.paths '[\"text.txt\"]' --data.tokenizer bytes", "vocab"),
        ("folder --json", "folder"),
        (LONG, "is not a directory"),
    ],
    "convert": [
        ("", "HF_DIR | RUN_DIR OUT is missing; see python -m meshtrain.convert --help"),
        ("a b c", "3 names"),
        ("nowhere", "nowhere"),
        ("folder", "folder"),
        ("text.txt", "text.txt"),
        ("run", "is a run directory; also give the model folder to write its weights to", "OUT"),
        ("hf out", "hf"),
        ("run hf", "hf"),
        ("run folder", "folder"),
        ("run text.txt", "text.txt"),
        ("run text.txt/out", "text.txt"),
        ("run run", "run"),
        (LONG, "xxx"),
        (LONG + " out", "no complete checkpoint"),
        ("run " + LONG, "name too long"),
        ("run out --step 99", "99"),
        ("run out --step -1", "--step -1"),
        ("run out --dtype float8", "--dtype float8"),
        ("run out --dtype", "--dtype"),
        ("run out --shard-gb 0", "--shard-gb 0"),
        ("run out --shard-gb nan", "--shard-gb nan"),
        ("run out --shard-gb -5", "--shard-gb -5"),
        ("run out --shard-gb inf", "--shard-gb inf"),
        ("run out --shard-gb huge", "--shard-gb huge"),
        ("run out --adapters", "--adapters"),
        ("run out --model.embed_dim 3", "--model.embed_dim"),
        ("run out --force", "--force"),
        ("run s3://bucket/out", "s3://bucket/out"),
        ("hf_empty", "hf_empty"),
        ("hf_list", "hf_list"),
        ("hf_unknown", "llamb"),
        ("hf_truncated", "hf_truncated"),
        ("hf_shape", "hf_shape"),
        ("hf_nan", "hf_nan"),
    ],
    "inspect": [
        ("nowhere.toml", "no such run file"),
        ("sound.toml half.toml", "2 names are given"),
        ("--topology", "--topology", "h100:64"),
        ("--topology nonsense", "nonsense"),
        ("--topology h100", "h100"),
        ("--topology h100:0", "h100:0"),
        ("--topology h100:-8", "h100:-8"),
        ("--topology h100:eight", "h100:eight"),
        ("--topology h1000:8", "h1000", "h100"),
        ("--topology mi300x:8", "mi300x"),
        ("--topology :8", "unknown GPU"),
        ("--topology cpu:8", "cpu"),
        ("--topology h100:99999999999", "h100:99999999999"),
        ("--topology h100:7 --mesh.data 8", "7"),
        ("--assume", "has no value", "matmul.best=0.7"),
        ("--assume matmul.best", "matmul.best", "NAME=NUMBER"),
        ("--assume matmul.best=2", "matmul.best=2", "between 0.01 and 1"),
        ("--assume matmul.best=nan", "matmul.best"),
        ("--assume matmul.sustaned=0.5", "matmul.sustaned", "did you mean matmul.sustained"),
        ("--assume hbm.share=0.7", "GPU of known speed", "--topology"),
        ("--topology h100:8 --assume overlap.fsdp=0.5", "--assume overlap.fsdp applies only to the formulas"),
        ("--update", "--update needs a file"),
        ("--expect", "--expect has no value"),
        ("--expect nowhere.toml", "--expect=nowhere.toml", "no such file", "--update"),
        ("--expect half.toml", "half.toml is not a file that --update wrote"),
        ("--expect sound.toml", "--expect=sound.toml is not a file that --update wrote"),
        ("--expect folder", "folder"),
        ("--expect list.json", "list.json"),
        ("--expect latin1.toml", "latin1.toml"),
        ("--expect text.txt/x --update", "text.txt/x"),
        ("--expect folder --update", "folder"),
        ("--html folder", "folder"),
        ("--html text.txt", "text.txt"),
        ("--html nowhere/page.html", "nowhere"),
        (LONG, "name too long"),
        ("--expect " + LONG, "name too long"),
        ("--schedule --expect x.toml", "--schedule"),
        ("--schedule --html x.html", "--schedule"),
        ("--steps 3", "--training.steps"),
        ("--mesh.tensor 3", "mesh.tensor=3"),
        ("--model.preset llama9", "llama9"),
        ("--pipeline.schedule zb", "zb"),
    ],
    "plan": [
        ("", "--gpus is missing", "--gpu is missing"),
        ("--gpus 8 --gpu h100", "the model is missing"),
        ("nowhere --gpus 8 --gpu h100", "is neither a run file nor a model"),
        ("nowhere.toml --gpus 8 --gpu h100", "there is no such run file"),
        ("folder --gpus 8 --gpu h100", "folder"),
        ("half.toml --gpus 8 --gpu h100", "half.toml"),
        ("llama3-8b --gpus 0 --gpu h100", "--gpus 0"),
        ("llama3-8b --gpus -8 --gpu h100", "--gpus"),
        ("llama3-8b --gpus 8,x --gpu h100", "--gpus 8,x is not a whole number"),
        ("llama3-8b --gpus 8,,16 --gpu h100", "--gpus 8,,16 is not a whole number"),
        ("llama3-8b --gpus '' --gpu h100", "--gpus"),
        ("llama3-8b --gpus ٨ --gpu h100 --json --global-batch ²", "--global-batch"),
        ("llama3-8b --gpus 131073 --gpu h100", "131073"),
        ("llama3-8b --gpus 1e3 --gpu h100", "1e3"),
        ("llama3-8b --gpus 8 --gpu h1000", "--gpu h1000 is unknown"),
        ("llama3-8b --gpus 8 --gpu cpu", "--gpu cpu is unknown; use one of a100-40gb"),
        ("llama3-8b --gpus 8", "--gpu is missing"),
        ("llama3-8b --gpu h100", "--gpus is missing"),
        ("llama3-8b --gpus 8 --gpu h100 --tensor", "has no value"),
        ("llama3-8b --gpus 8 --gpu h100 --nonsense 3", "--nonsense"),
        ("llama3-8b --gpus 8 --gpu h100 --global-batch 3 --data 8", "batch=3 does not divide over data 8"),
        ("llama3-8b --gpus 8 --gpu h100 --seq-len 0", "--seq-len 0"),
        ("llama3-8b --gpus 8 --gpu h100 --global-batch 7.5", "--global-batch 7.5"),
        ("llama3-8b --gpus 8 --gpu h100 --tensor 3", "--tensor 3", "no mesh of 8 GPUs"),
        ("llama3-8b --gpus 8 --gpu h100 --max-memory -1", "--max-memory -1"),
        ("llama3-8b --gpus 8 --gpu h100 --max-memory nan", "--max-memory nan"),
        ("llama3-8b --gpus 8 --gpu h100 --tokens inf", "--tokens inf"),
        ("llama3-8b --gpus 8 --gpu h100 --max-memory none", "is not a number of GiB"),
        ("llama3-8b --gpus 8 --gpu h100 --tokens much", "is not a number of tokens"),
        ("llama3-8b --gpus 8 --gpu h100 --budget-hours none", "--budget-hours none"),
        ("llama3-8b --gpus 8 --gpu h100 --schedule zb_h1", "--schedule zb_h1 is unknown; use one of gpipe"),
        ("llama3-8b --gpus 8 --gpu h100 --schedule gpip", "gpip"),
        ("llama3-8b --gpus 8 --gpu h100 --remat some", "some"),
        ("llama3-8b --gpus 8 --gpu h100 --rules nowhere.toml", "cannot read nowhere.toml"),
        ("llama3-8b --gpus 8 --gpu h100 --assume nothing=1", "nothing"),
        ("llama3-8b --gpus 8 --gpu h100 --assume matmul.best=2", "must lie between"),
        ("llama3-8b --gpus 8 --gpu h100 --write no/where.toml", "cannot be written"),
        ("llama3-8b --gpus 8 --gpu h100 --write text.txt", "text.txt"),
        ("llama3-8b --gpus 8 --gpu h100 --html nowhere/p.html", "nowhere"),
        ("llama3-8b --gpus 8,16 --gpu h100 --write p.toml", "--write", "one number of GPUs"),
        ("llama3-8b --gpus 8,16 --gpu h100 --verify 2", "one number of GPUs"),
        ("llama3-8b --gpus 8 --gpu h100 --verify 0", "--verify 0 is not a whole number of at least 1"),
        ("llama3-8b --gpus 8 --gpu h100 --gpus-per-host x", "--gpus-per-host x"),
        ("llama3-8b --gpus 8 --gpu a100-80gb --model.matmul_dtype float8", "float8"),
        ("llama3-8b gpt2-124m --gpus 8 --gpu h100", "gpt2-124m"),
        ("llama3-8b --gpus 8 --gpu h100 --compute-dtype fp16", "fp16"),
    ],
    "tokenize": [
        ("nowhere.toml", "no such run file"),
        ("half.toml", "half.toml", "at end of document"),
        ("--processes 4", "--processes 4"),
        ("--processes 4/4", "give the index of this process"),
        ("--processes -1/4", "--processes"),
        ("--processes 0/0", "--processes 0/0"),
        ("--processes", "has no value; write e.g. --processes 0/4"),
        ("--data.sauce x", "did you mean data.source?"),
        ("--verfy", "--verfy"),
        ("--data.source text --data.paths '[\"nowhere.txt\"]'", "nowhere.txt"),
        ("--data.source text --data.paths '[\"folder\"]'", "folder"),
        ("--data.source jsonl --data.paths '[\"broken.jsonl\"]'", "broken.jsonl, line 2: broken JSON"),
        ("--data.source jsonl --data.paths '[\"other.jsonl\"]'", "other.jsonl"),
        ("--data.source chat --data.paths '[\"other.jsonl\"]'", "data"),
        ("--data.tokenizer text.txt --data.source text --data.paths '[\"text.txt\"]'", "text.txt"),
        ("--data.tokenizer hf --data.source text --data.paths '[\"text.txt\"]'", "hf"),
        ("--data.cache text.txt --data.source jsonl --data.paths '[\"other.jsonl\"]' --data.field body", "text.txt"),
    ],
    "report": [
        ("", "is missing"),
        ("nowhere", "nowhere is not a directory", "runs/"),
        ("folder", "not a run directory", "config.toml"),
        ("run_bare", "run_bare/config.toml", "run file"),
        ("text.txt", "text.txt"),
        ("hf", "hf"),
        ("run hf", "hf is not a run directory", "config.toml"),
        ("run run", "run is given twice", "give different runs"),
        ("run folder/../run", "folder/../run is given twice (as run, too)"),
        ("run nowhere run_bare", "nowhere is not a directory", "run_bare/config.toml"),
        ("run a b c d e f g h", "9 names are given"),
        ("run --training.steps 3", "training.steps"),
        ("run --html", "--html has no value"),
        ("run --html text.txt", "text.txt"),
        ("run --html folder", "folder"),
        ("run --html nowhere/p.html", "nowhere"),
        ("run --html ''", "--html"),
        ("run/metrics.jsonl", "metrics.jsonl"),
        ("run_other", "run_other"),
        ("run --jsn", "--jsn is not an option; did you mean --json"),
        ("gs://bucket/run", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("ftp://host/run", "ftp://host/run"),
        (LONG, "is not a directory"),
        ("run --html " + LONG, "name too long"),
    ],
    "meshtrain.launch.local": [
        ("", "--processes is missing"),
        ("--processes 0", "--processes 0", "at least 1"),
        ("--processes -2", "--processes -2", "at least 1"),
        ("--processes two", "--processes two"),
        ("--proceses 2 --", "--proceses is not an option; did you mean --processes?"),
        ("--processes 2 --max-restarts -1", "--max-restarts -1"),
        ("--processes 4 --min-processes 5 --max-restarts 3 --", "from 1 to --processes 4"),
        ("--processes 2 --min-processes 1 --max-restarts 1 --", "--max-restarts of at least 2"),
        ("--processes 4 --min-processes 2 --max-restarts 3 --", "use mesh.data=-1 or mesh.fsdp=-1"),
        ("--processes 2 --training.steps 3", "--training.steps 3", "after --"),
        ("--processes 2 sound.toml", "--processes 2 -- sound.toml"),
        ("--processes 2 -- nowhere.toml", "no such run file"),
        ("--processes 2 -- --training.stps 3", "training.stps", "training.steps"),
        ("--processes 3 --", "mesh.simulated_devices=8", "--processes 3", "--processes 2 or --processes 4"),
        ("--processes 16 --", "mesh.simulated_devices=8", "--processes 8,", "multiple of 16"),
        (f"--processes 2 -- {PLACE}", "[distributed]", "launcher"),
    ],
    "meshtrain.launch.pod": [
        ("--", "--attempt"),
        ("--attempt= --", "--attempt has no value"),
        ("--attempt -1", "--attempt", "at least 0"),
        ("--attempt x", "x"),
        ("--attempt 0 --max-restarts -1", "--max-restarts"),
        ("--attempt 0 -- nowhere.toml", "no such run file"),
        ("--attempt 0 --training.steps 3", "--training.steps"),
        ("--attempt 0 sound.toml", "-- sound.toml"),
        ("--attempt 0 -- --run.dir text.txt/run --training.stps 1", "training.stps", "training.steps"),
    ],
    "meshtrain.launch.ray": [
        ("", "--processes is missing"),
        ("--processes 0", "--processes 0", "at least 1"),
        ("--processes 2 --gpus-per-process -1", "--gpus-per-process -1", "at least 0"),
        ("--processes 2 --cpus-per-process 0", "--cpus-per-process 0"),
        ("--processes 2 --max-restarts -1", "--max-restarts -1"),
        ("--processes 2 --min-processes 3", "--min-processes 3", "--processes 2"),
        ("--processes 2 --min-processes 1 -- --mesh.data 4 --mesh.fsdp 2 --mesh.tensor 1", "--min-processes",
         "mesh.data=-1"),
        ("--processes 2 sound.toml", "after --", "-- sound.toml"),
        ("--processes 2 -- nowhere.toml", "no such run file"),
        ("--processes 2 -- --training.stps 3", "training.stps", "training.steps"),
        ("--processes 3 --", "simulated_devices=8", "--processes 3"),
        ("--processes 2 --gpus-per-process 1 --", "simulated_devices=8", "--gpus-per-process 1"),
        ("--processes 2 --gpus-per-process 0 -- configs/llama3-8b-64.toml", "--gpus-per-process 0"),
        (f"--processes 2 -- {PLACE}", "[distributed]"),
    ],
    "meshtrain.launch.elastic": [
        ("", "--processes"),
        ("--processes 0 --devices 8", "--processes 0 is not a whole number of at least 1"),
        ("--processes 2 --devices 0", "--devices 0"),
        ("--processes 8 --devices 8 --mesh.data 8",
         "after --, e.g. python -m meshtrain.launch.elastic --processes 2 -- --mesh.data 8"),
        ("--processes 2 --devices 4 -- nowhere.toml", "no such run file"),
        ("--processes 2 --devices 4 --full 64 --min-processes 0", "--min-processes"),
        ("--processes 3 --devices 1 --full 8 --min-processes 3 -- --mesh.data 8 --mesh.simulated_devices 8",
         "no number of processes"),
    ],
    "meshtrain.launch.restart": [
        ("", "CODE"),
        ("one", "one"),
        ("1 2", "2"),
        ("1 --max-restarts x", "x"),
        ("1 -- --training.stpes 3", "training.steps"),
    ],
}


CASES = [(command, words, parts) for command, rows in ROWS.items() for words, *parts in rows]


@pytest.fixture(scope="module")
def world(home, tiny, tmp_path_factory) -> Path:
    """What stands where the mistakes are made."""
    world = tmp_path_factory.mktemp("world")
    shutil.copy(home / "corpus.txt", world / "text.txt")
    ran = call(train.main, *tiny, "--training.steps", 1, "--run.dir", world / "run", "--metrics.tensorboard", "false")
    assert ran.code == 0, ran
    files = {
        "empty.txt": "", "blank.txt": "\n \n", "batch.toml": RULES, "mine/rules.toml": RULES,
        "run_bare/config.toml": "[run]\nname = 'x'\n",
        "folder/mine.txt": "mine", "sound.toml": "[training]\nsteps = 3\n[data]\nsource = 'stdlib'\n",
        "half.toml": "[mesh]\ndata = [1,\n",
        "null.toml": '[run]\ndir = "a\\u0000b"\n', "far.toml": f'extends = "{LONG}"\n',
        "nul.toml": "[run]\nname = 'a\0b'\n", "list.json": "[1, 2]", "circle.toml": 'extends = "circle.toml"\n',
        "broken.jsonl": '{"text": "one"}\n{"text": \n', "other.jsonl": '{"body": "one"}\n', "fake.txt.gz": "no gzip",
        "latin1.toml": b"[run]\nname = '\xe9'\n", "utf16.toml": "[run]\nname = 'a'\n".encode("utf-16"),
        "bytes.bin": bytes(range(128, 256)),
        "run_other/metrics.jsonl": "what is this\n", "run_other/config.toml": "[wheels]\ncount = 4\n",
        "hf_empty/config.json": ""}
    for name, content in files.items():
        (world / name).parent.mkdir(exist_ok=True)
        (world / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    np.save(world / "alone.tokens.npy", np.arange(99, dtype=np.uint16))
    (world / "loop.toml").symlink_to("loop.toml")
    (world / "dangling.toml").symlink_to("gone.toml")
    os.mkfifo(world / "fifo")
    settings = json.loads((GOLDENS / "llama3.2" / "config.json").read_text())
    weights = (GOLDENS / "llama3.2" / "model.safetensors").read_bytes()
    for name, changed, held in (("hf", {}, weights),
                                ("hf_unknown", {"architectures": ["LlambForCausalLM"], "model_type": "llamb"}, weights),
                                ("hf_truncated", {}, weights[:-100]),
                                ("hf_shape", {"hidden_size": 2 * settings["hidden_size"]}, weights),
                                ("hf_no_weights", {}, None), ("hf_nan", {"rms_norm_eps": math.nan}, weights)):
        (world / name).mkdir()
        (world / name / "config.json").write_text(json.dumps(settings | changed))
        if held:
            (world / name / "model.safetensors").write_bytes(held)
    (world / "hf_list").mkdir()
    (world / "hf_list" / "config.json").write_text("[]")
    return world


def standing(directory: Path) -> dict:
    """What is there, and when it was written last; but for what every start that claims a directory leaves in it."""
    return {str(path.relative_to(directory)): (path.lstat().st_size, path.lstat().st_mtime_ns)
            for path in directory.rglob("*")
            if not path.is_dir() and path.name != ".lock" and "stacks" not in path.parts}


def told(command: str, words: str) -> Ran:
    """What a command says; argparse ends a launcher by SystemExit."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = MAINS[command](shlex.split(words))
        except SystemExit as ended:
            code = ended.code
    return Ran(code, out.getvalue(), err.getvalue())


@pytest.mark.parametrize("command, words, parts", CASES, ids=[f"{command} {words}"[:90] for command, words, _ in CASES])
def test_a_mistake_is_one_message_and_writes_nothing(command, words, parts, world, monkeypatch):
    monkeypatch.chdir(world)
    before = standing(world)
    with limited(LIMIT_S):
        ran = told(command, words)
    assert ran.code == 2 and "Traceback" not in ran.err + ran.out, ran
    assert len(re.findall(r"\berror: ", ran.err)) == 1, ran.err
    assert [part for part in parts if part not in ran.err] == [], ran.err
    assert standing(world) == before


# What only the start sees: how many tokens the data have. Words that are options of check, or a name of it.
AT_THE_START = ("--data.seq_len 100000", "--json", "''")


CHECKED = [(words, parts) for command, words, parts in CASES
           if command == "train" and not words.startswith(AT_THE_START)]


@pytest.mark.parametrize("words, parts", [pytest.param(*case, marks=[pytest.mark.full] * (number % 3 > 0))
                                          for number, case in enumerate(CHECKED)], ids=lambda value: str(value)[:90])
def test_check_tells_what_training_refuses(words, parts, world, monkeypatch):
    monkeypatch.chdir(world)
    before = standing(world)
    with limited(LIMIT_S):
        ran = call(check.main, *shlex.split(words))
    assert ran.code in (2, check.DOES_NOT_FIT) and "Traceback" not in ran.err + ran.out, ran
    assert [part for part in parts if part not in ran.out + ran.err] == [], ran
    assert standing(world) == before


def test_a_run_file_may_come_through_a_pipe(world, monkeypatch):
    """`train <(sed … run.toml)`: this is why a pipe that nobody writes to is waited for, and is in no row."""
    monkeypatch.chdir(world)
    reads, writes = os.pipe()
    os.write(writes, b"[training]\nsteps = 0\n")
    os.close(writes)
    refused(told("train", f"/dev/fd/{reads}"), "training.steps=0")
    os.close(reads)
