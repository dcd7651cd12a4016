"""Launch scripts are read as bash would expand them, and never run. The words expected are those that bash itself gives."""

import shutil
import subprocess

import pytest
import yaml

from peakcast.core.errors import SpecError
from peakcast.dialects.shell.launch import flags_to_mapping, launch_of
from peakcast.dialects.shell.script import LEFT_OUT, read_script
from peakcast.doors.questions import translation_of

SCRIPTS = {
    "arrays": 'A=(--x 1\n  --y "two words" # comment )\n  --z\n)\nA+=(--w)\nshow "${A[@]}" ${#A[@]} ${A[1]}',
    "unquoted array splits": 'A=("--fp8-format hybrid" "--b")\nshow ${A[@]}',
    "defaults": 'X=${1:-"a b"}\nY=${NOPE:=7}\nZ=${X:+set}\nshow "$X" $X $Y $NOPE $Z ${Q-r}',
    "arithmetic": "G=8\nN=2\nshow $(($G*$N)) $((G * N + 1)) $(( (G-1)/N ))",
    "quotes": """A="x y"\nshow '$A' "$A" $A "a'b" 'a"b' "\\$A" a\\ b""",
    "continued": 'OPTS=" \\\n  --a 1 \\\n  --b $((2*3)) \\\n"\nshow $OPTS \\\n  --c # end\nshow next',
    "if": 'D=fp8\nif [[ "$D" == "fp8" ]] && [ -n "$D" ]; then\n  A=1\nelse\n  A=3\nfi\nshow $A',
    "else": "if [ 3 -gt 5 ]; then\n A=1\nelif [[ -z $NOPE ]]; then\n A=2\nelse\n A=3\nfi\nshow $A",
    "nested if": "if [ a = b ]; then\n if [ a = a ]; then A=1; fi\nelse\n A=2\nfi\nshow $A",
    "test and": "X=1\n[[ $X -eq 1 ]] && show yes\n[ $X -ne 1 ] || show no",
    "arithmetic test": "T=2\nN=2\n"
    "if (( T > 1 && N * T >= 4 )); then A=1; fi\n(( T > 4 )) || show no\n(( N == 2 )) && show $A",
    "arithmetic assignment": "T=2\n(( N = T * 4 ))\n(( N += 1 ))\nshow $N",
    "append": 'A="x"\nA+=" y"\nA="$A z"\nshow $A',
    "eval": 'C="show --a 1"\neval $C',
    "bash -c": 'C="show --a 1"\nbash -c "$C --b"',
    "env before": "A=1\nshow a $A",
    "heredoc": "cat <<EOF > /dev/null\nshow bad\nEOF\nshow good",
    "semicolons": "A=1; B=2; show $A $B; show end",
    "empty": 'A=""\nshow $A "$A" x$A',
    "empty prefix": "X= Y=2 show a\nshow [$X]",
    "for": 'for size in 1 "b c"; do\n  if [ "$size" = 1 ]; then continue; fi\n  show "$size"\ndone\nshow $size',
    "for over an array": 'A=(x y)\nfor i in "${A[@]}"; do show $i; [[ $i == x ]] && break; done',
    "while": "set -- --a 1 --b\nwhile [[ $# -gt 0 ]]; do\n"
    " case $1 in\n --a) A=$2; shift 2;;\n *) B=1; shift;;\n esac\ndone\nshow $A $B",
    "case": 'M=llama-7b\ncase "$M" in\n  qwen*|*72b) A=1 ;;\n  *-7b) A=2 ;;\n  *) A=3 ;;\nesac\nshow $A',
    "function": 'run() {\n  local n=$1; shift\n  show $n "$@"\n}\nrun 7b "x y"\nfunction other { show o; }\nother',
    "pattern": "D=fp8_hybrid\nif [[ $D == fp8* && ! -z $D ]]; then show yes; fi\n[[ $D != *x ]] && show no",
    "read": "read -r -d '' C <<EOF || true\n--a $((1+1)) \\\n  --b\nEOF\nshow $C",
    "cat in a variable": "C=$(cat <<'EOF'\n--a $1\n--b\nEOF\n)\nshow $C $(echo x y)",
    "expr": "N=2\nshow $(expr 16 / $N)",
    "exported text": 'N=3\nexport "A=$N b"\nshow "$A"',
    "and or": "true && show a && show b\nshow c 2>/dev/null; show d | cat",
    "comparisons in arithmetic": "T=2\nshow $(( ($T > 1) ? 1 : 0 )) $(( T == 3 )) $(( T < 3 ? T + 5 : 0 ))",
    "parts of a path": 'P=/a/b/c.sh\nshow $(dirname $P) $(basename "$P") $(dirname $(dirname $P)) $(dirname c.sh)',
    "subshell": "(cd / && show in)\n{ show braces; }",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_that_bash_gives(name):
    bash = shutil.which("bash")
    assert bash is not None
    shown = 'show() { printf "<%s>" "$@"; printf "\\n"; }; export -f show\n'
    answer = subprocess.run(
        [bash, "-c", shown + SCRIPTS[name]],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    ).stdout
    commands = [command for command in read_script(SCRIPTS[name]).commands if command.words[0] == "show"]
    ours = "".join("".join(f"<{word}>" for word in command.words[1:]) + "\n" for command in commands)
    assert ours == answer


ARGUMENTS = """show $1 "$2" ${3-none} ${3:-empty} $# a"$1"b ${12:-x}
show "$@"
show "${@:2}" $* "$*"
show "x$@"
[ $# -gt 2 ] && show many
shift
show "$1" $# "${@}"
shift 2
show end "$@"
"""


@pytest.mark.parametrize("given", [[], ["8"], ["8", "llama a"], ["8", "llama a", "", "y  z"]])
def test_arguments_are_those_that_it_is_given(given, tmp_path):
    bash = shutil.which("bash")
    assert bash is not None
    path = tmp_path / "train.sh"
    path.write_text('show() { printf "<%s>" "$@"; printf "\\n"; }\n' + ARGUMENTS)
    answer = subprocess.run([bash, str(path), *given], capture_output=True, text=True, timeout=10, check=False).stdout
    commands = [command for command in read_script(ARGUMENTS, given).commands if command.words[0] == "show"]
    ours = "".join("".join(f"<{word}>" for word in command.words[1:] or ("",)) + "\n" for command in commands)
    assert ours == answer


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    text = f'A=$(touch {mark})\nB=`touch {mark}`\ntouch {mark}\neval "touch {mark}"\nbash -c "touch {mark}"\n: > {mark}\n'
    script = read_script(text)
    assert not mark.exists()
    assert [command.words for command in read_script('A=`x "y z" a`b\nshow $A `x y` c').commands] == [("show", "b", "c")]
    assert any("is not run" in note for note in script.notes)


def test_what_only_running_could_tell_is_passed_over_and_said():
    text = "for ((i = 0; i < 2; i++)); do\n  show $i\ndone\nwhile read line; do\n  show $line\ndone\nshow end"
    script = read_script(text)
    assert [command.words for command in script.commands] == [("show", "end")]
    assert len([note for note in script.notes if "is not followed" in note]) == 2


@pytest.mark.parametrize(
    ("condition", "branches"),
    [("[ -f ds.json ]", ("A=1", "exit 1")), ("[[ ! -e ds.json ]]", ("exit 2", "A=1")), ("(( ${X:?} ))", ("A=1", "exit 1"))],
)
def test_a_branch_that_ends_with_an_error_is_not_the_one_that_trains(condition, branches):
    script = read_script(f"if {condition}; then\n {branches[0]}\nelse\n {branches[1]}\nfi\nshow $A")
    assert script.commands[-1].words == ("show", "1")
    assert "as else the script ends with an error" in script.notes[-1]


def test_files_that_are_at_hand_are_sourced():
    files = {"env.sh": "GPUS=8\nsize() { SIZE=$1; }"}
    script = read_script("source env.sh\n. other.sh\nsize 7b\nshow $GPUS $SIZE", sourced=files.get)
    assert [command.words for command in script.commands] == [("show", "8", "7b")]
    assert [note for note in script.notes if "other.sh" in note and "is not followed" in note]


def test_here_documents_are_files_that_the_script_writes():
    script = read_script(
        'B=2\ncat > a.json << EOF\n{"b": $B}\nEOF\ncat <<\'X\' > b.json\n{"b": "$B"}\nX\ntee c.json <<EOF\n1\nEOF'
    )
    assert script.files == {"a.json": '{"b": 2}\n', "b.json": '{"b": "$B"}\n', "c.json": "1\n"}


@pytest.mark.parametrize(
    "text",
    [
        "A=aaaaaaaaaa\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 30,
        "A=(a b c d e f g h i j)\n" + "A=(${A[@]} ${A[@]} ${A[@]} ${A[@]})\n" * 30,
        "C='eval $C'\neval $C",
        "show a\n" * 60_000,
        "x" * 400_000,
        "f() { f; }\nf",
        "while true; do A=$((A+1)); done",
        "( " * 200 + "show a" + " )" * 200,
    ],
)
def test_a_script_that_grows_without_end_is_refused(text):
    with pytest.raises(SpecError):
        read_script(text)


@pytest.mark.parametrize(
    "text", ['"', "'", "$(", "${", "`", "A=(", "if", "fi", "((", "${A[", "\\", "$((", "<<EOF", "&&", "case x in"]
)
def test_unfinished_text_is_read_somehow(text):
    assert read_script(text).commands is not None


OWN_FOLDER = {
    "source": 'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd)"\nsource "$HERE/s.sh";show $LAYERS',
    "two levels up": 'ROOT=$( cd "$( dirname "$0" )/.." && pwd )\nshow $ROOT',
    "run": "export LAYERS=5\nN=2\nbash run.sh 3",
}


@pytest.mark.parametrize(("name", "words"), [("source", "7"), ("two levels up", "./.."), ("run", "5 3 ./run.sh")])
def test_files_are_searched_from_the_scripts_own_folder(name, words):
    """A script that another one runs sees what that exports, and its own arguments."""
    files = {"./s.sh": "LAYERS=7\n", "run.sh": 'show $LAYERS$N $1 "$(dirname "$0")/$(basename $0)"\n'}
    script = read_script(OWN_FOLDER[name], sourced=files.get, where="./train.sh")
    assert [" ".join(command.words[1:]) for command in script.commands if command.words[0] == "show"] == [words]


SLIME = "python3 train.py --actor-num-gpus-per-node 4 --num-rollout 9 --rollout-batch-size 8 --use-dynamic-batch-size"
MISSING = {
    f"source models/glm4.sh\n{SLIME} --max-tokens-per-gpu 4608 ${{MODEL_ARGS[@]}}": "glm4.sh' is not followed",
    "MODEL_SIZE=671B bash examples/train_deepseekv3.sh": "runs examples/train_deepseekv3.sh",
    "srun bash -c 'podman run $IMAGE /bin/bash -c \"cd x; TP=2 bash run.sh 2>&1 | tee log\"'": "runs run.sh",
}


@pytest.mark.parametrize("text", MISSING)
def test_another_script_that_is_not_here_is_named(text, tmp_path):
    (tmp_path / "train.sh").write_text(text)
    with pytest.raises(SpecError, match=MISSING[text]):
        translation_of(tmp_path / "train.sh")


def test_arguments_that_a_script_takes_and_is_not_given_are_said():
    taken, defaulted = read_script("torchrun train.py --lr $1"), read_script("torchrun train.py --lr ${1:-2}")
    assert any("read without arguments" in note for note in taken.notes)
    assert not defaulted.notes
    assert not read_script("torchrun train.py --lr $1", ["3"]).notes


LAUNCHES = [
    ("torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 4 --bf16", "pretrain_gpt.py", 16),
    ("torchrun --nproc-per-node=4 --nnodes=1:2 pretrain_gpt.py --bf16", "pretrain_gpt.py", 8),
    ("python -u -m torch.distributed.launch --nproc_per_node 8 --use_env pretrain_gpt.py --bf16", "pretrain_gpt.py", 8),
    ("accelerate launch --num_processes 4 --mixed_precision bf16 sft.py --bf16", "sft.py", 4),
    ("oumi distributed torchrun --nproc-per-node 4 sft.py --bf16", "sft.py", 4),
    ("oumi distributed torchrun -m trl.sft --bf16", "trl.sft", None),
    ("oumi distributed torchrun --nproc-per-node=4 -m oumi train -c a.yaml", "oumi train", 4),
    ("oumi distributed accelerate launch --num_processes 8 -m oumi train -c a.yaml", "oumi train", 8),
    ("accelerate launch --use_fsdp --num_processes 2 -m oumi.train -c a.yaml", "oumi.train", 2),
    ("python -m accelerate.commands.launch --num_processes 4 sft.py --bf16", "sft.py", 4),
    ("deepspeed --num_gpus 8 --num_nodes 2 train.py --deepspeed ds.json", "train.py", 16),
    ("deepspeed --master_port=1 --include=localhost:0,1,2,3 train.py --deepspeed ds.json", "train.py", 4),
    ("deepspeed -i worker-0:0,1@worker-1:3 train.py --deepspeed ds.json", "train.py", 3),
    ("deepspeed --include worker-0@worker-1:0,2 train.py --deepspeed ds.json", "train.py", None),
    ("CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed train.py --deepspeed ds.json", "train.py", 4),
    ("export CUDA_VISIBLE_DEVICES=4,5\naccelerate launch sft.py --bf16", "sft.py", 2),
    ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file a.yaml sft.py --bf16", "sft.py", None),
    ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node=gpu sft.py --bf16", "sft.py", 3),
    ("torchrun --nproc_per_node $(nvidia-smi -L | wc -l) sft.py --bf16", "sft.py", None),
    ("CUDA_VISIBLE_DEVICES=0,1 deepspeed --hostfile hosts train.py --deepspeed ds.json", "train.py", None),
    (
        "tune run --nproc_per_node 2 lora_finetune_distributed --config a.yaml batch_size=4",
        "tune run lora_finetune_distributed",
        2,
    ),
    (
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file a.toml --training.seq_len 4096",
        "torchtitan.train",
        8,
    ),
    ("mpirun -np 16 --npernode 8 -hostfile h -x A=$B -bind-to none -x PATH python pretrain_gpt.py --bf16",
     "pretrain_gpt.py", 16),
    ("mpirun -n 2 -N 1 torchrun --nproc_per_node 8 --nnodes 2 train.py --bf16", "train.py", 16),
    (
        "docker run --gpus all --ipc=host -v $PWD/run.sh:/run.sh -w /w nvcr.io/nvidia/pytorch:25.06-py3 "
        "torchrun --nproc_per_node=8 run_clm.py --bf16",
        "run_clm.py",
        8,
    ),
    ("docker run -e CUDA_VISIBLE_DEVICES=0,1 hiyouga/llamafactory llamafactory-cli train --stage sft",
     "llamafactory-cli train", 2),
    ("docker run --rm nvcr.io/x bash -c 'torchrun --nproc_per_node 4 run_clm.py --bf16'", "run_clm.py", 4),
    ("singularity exec --nv --env=NPROC_PER_NODE=4 x.sif llamafactory-cli train --stage sft", "llamafactory-cli train", 4),
    ("srun singularity run --nv --bind /data torch.sif python pretrain_gpt.py --bf16", "pretrain_gpt.py", None),
    ("FORCE_TORCHRUN=1 llamafactory-cli train a.yaml", "llamafactory-cli train", None),
    ("axolotl train a.yml --micro-batch-size 2", "axolotl train", None),
    ("srun --mpi=pmix -l python pretrain_gpt.py --bf16", "pretrain_gpt.py", None),
    ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\nsrun python pretrain_gpt.py --bf16", "pretrain_gpt.py", 32),
    ("#SBATCH -N 2\n#SBATCH --gres=gpu:h100:8\nsrun python pretrain_gpt.py --bf16", "pretrain_gpt.py", 16),
    (
        "python mason.py --num_nodes 4 --gpus 8 -- accelerate launch --num_processes 8 open_instruct/finetune.py --bf16",
        "finetune.py",
        32,
    ),
    (
        "python mason.py --num_nodes 2 --gpus 8 -- torchrun --nnodes=2 --nproc_per_node=8 open_instruct/dpo.py --bf16",
        "dpo.py",
        16,
    ),
    (
        "uv run python mason.py --num_nodes 4 --gpus 8 -- source env.sh \\&\\& torchrun --nnodes 4 --nproc_per_node 8 "
        "open_instruct/dpo.py --bf16",
        "dpo.py",
        32,
    ),
    ("swift export --model a\nNPROC_PER_NODE=4 megatron sft --model a\nswift infer --model b", "megatron sft", None),
    ("uv run --isolated --extra fsdp -m skyrl.train.main a=1", "skyrl.train.main", None),
    ("srun --container-image x -N 2 torchrun --nproc_per_node 4 pretrain_gpt.py --bf16", "pretrain_gpt.py", 4),
    (
        "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\nN=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))\n"
        "accelerate launch --num_processes $N pretrain_gpt.py --bf16",
        "pretrain_gpt.py",
        32,
    ),
]


STARTS = ("bash", "srun -N 2 bash", "srun -N 2 -n 2 ./", "docker run --rm -v /a:/b image bash", "nohup sh")


@pytest.mark.parametrize("how", STARTS)
def test_a_script_is_followed_however_it_is_started(how, tmp_path):
    (tmp_path / "inner.sh").write_text("torchrun --nproc_per_node 4 run_clm.py --bf16 --seed $1\n")
    (tmp_path / "outer.sh").write_text(f"{how} inner.sh 7\n".replace("./ ", "./"))
    read = read_script((tmp_path / "outer.sh").read_text(), sourced=lambda name: (tmp_path / name).read_text())
    launch = launch_of(read, "", "outer.sh")
    assert (launch.program, launch.num_gpus, launch.arguments["seed"]) == ("run_clm.py", 4, "7")


@pytest.mark.parametrize(("text", "program", "num_gpus"), LAUNCHES)
def test_launchers_say_the_program_and_the_number_of_gpus(text, program, num_gpus):
    launch = launch_of(read_script(text), text, "a script")
    assert (launch.program, launch.num_gpus) == (program, num_gpus)


def test_defaults_inside_one_another_have_a_bound():
    assert launch_of(read_script("python train.py --x ${a:-${b:-3}}"), "", "a script").arguments == {"x": "3"}
    with pytest.raises(SpecError, match="more than 8 defaults of variables inside one another"):
        read_script("python train.py --x " + "${a:-" * 20 + "}" * 20)


def test_the_training_command_is_told_from_those_around_it():
    text = (
        "python tools/preprocess_data.py --input a.json\ntorchrun pretrain_gpt.py --num-layers 2\npython upload.py --to x"
    )
    assert launch_of(read_script(text), text, "a script").arguments == {"num-layers": "2"}
    with pytest.raises(SpecError, match="runs no training program"):
        launch_of(read_script("ls -l\ncp a b"), "", "a script")


def test_a_variable_that_nothing_sets_is_named_where_its_value_is_missed():
    text = "ARGS=(--a $A)\nB=1\npython train.py ${ARGS[@]} --b $B --c ${C} --d 1"
    assert read_script(text).unset == {"a": "A", "c": "C"}
    with pytest.raises(SpecError, match=r"names no file.* takes it from \$DS, which is not set"):
        translation_of("deepspeed train.py --model_name_or_path gpt2 --per_device_train_batch_size 1 --deepspeed $DS")


def test_the_commands_of_task_files_are_read():
    """SkyPilot's `run`, and the containers of a Kubernetes manifest, with the variables that these set."""
    train = (
        "torchrun --nproc_per_node {} run_clm.py --model_name_or_path $MODEL --per_device_train_batch_size 3 --bf16 True"
    )
    sky = {
        "envs": {"MODEL": "gpt2"}, "resources": {"accelerators": "A100:8"},
        "run": "cd x\n" + train.format("$SKYPILOT_NUM_GPUS_PER_NODE"),
    }  # fmt: skip
    container = {"image": "x", "env": [{"name": "MODEL", "value": "gpt2"}], "command": ["bash", "-c", train.format(8)]}
    kubernetes = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "spec": {"Worker": {"containers": [container]}}}
    for task in (sky, kubernetes):
        job = translation_of(yaml.safe_dump(task)).job
        assert (job.architecture.name, job.micro_batch_size, job.parallelism.data_parallel_size) == ("gpt2", 3, 8)


def test_flags_as_argparse_and_hydra_have_them():
    words = "--a 1 --b --c x y --d=4 --neg -1e-4 --a 2 key=value nested.key=3"
    assert flags_to_mapping(words.split()) == (
        {"a": "2", "b": True, "c": ["x", "y"], "d": "4", "neg": "-1e-4", "key": "value", "nested.key": "3"},
        (),
    )
    assert flags_to_mapping(["a.yaml", "--x", "1"]) == ({"x": "1"}, ("a.yaml",))


def test_a_quoted_pattern_of_a_replacement_is_read():
    script = read_script("N=a/b\nOUT=\"x-${N/'/'/_}\"\ntorchrun train.py --out $OUT")
    assert [list(command.words[:2]) for command in script.commands] == [["torchrun", "train.py"]]


def test_lines_that_are_no_bash_are_named():
    script = read_script("A=1\nif then (\n", where="run.sh")
    assert script.notes == [f"In lines 1 to 2 of run.sh {LEFT_OUT}"]
    with pytest.raises(SpecError, match=r"runs no training program .* In lines 1 to 2 of run\.sh is something that"):
        launch_of(script, "", "run.sh")
    assert not read_script("if [ $A == 1 ]; then\ntorchrun train.py --bf16\n", where="run.sh").notes  # without its end
