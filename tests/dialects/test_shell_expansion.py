"""How the words of a launch script expand: arithmetic, pipelines that count, changes of texts, tables."""

import pytest

from peakcast.dialects.shell.launch import launch_of
from peakcast.dialects.shell.script import read_script


@pytest.mark.parametrize("sum_", ["${N} / (${T} * ${P})", "N/(T*P)", "(N + (T * (P + 4))) / (T * (P + 4)) + 0"])
def test_brackets_inside_arithmetic_are_followed(sum_):
    script = read_script(f"N=16\nT=2\nP=4\ntorchrun t.py --d $(({sum_}))x")
    assert (script.commands[0].words[-1], script.notes) == ("2x", [])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo $G | tr ',' '\\n' | wc -l", "3"),
        ("echo ${G//,/ } | wc -w", "3"),
        ("echo $G | awk -F, '{print NF}'", "3"),
        ("echo $G | awk -F ',' '{ print $2 }'", "5"),
        ("echo a b | awk '{print $1}'", "a"),
    ],
)
def test_pipelines_that_count_are_calculated(command, said):
    script = read_script(f"G=4,5,6\ntorchrun --nproc_per_node=$({command}) t.py --bf16")
    assert (script.commands[0].words[1], script.notes) == (f"--nproc_per_node={said}", [])


def test_other_pipelines_are_not_run():
    script = read_script("torchrun --n $(nvidia-smi -L | wc -l) t.py --bf16 $(echo a | sort)")
    assert list(script.commands[0].words) == ["torchrun", "--n", "t.py", "--bf16"]
    assert len(script.notes) == 2


@pytest.mark.parametrize("shell", ["sbatch", "bash", "/bin/sh"])
def test_a_here_document_for_a_shell_is_its_script(shell):
    text = f"N=4\n{shell} <<EOT\n#SBATCH --gres=gpu:4\nlitgpt pretrain --devices $N --out \\$HOME\nEOT\n"
    launch = launch_of(read_script(text), text, "run.sh")
    assert (launch.program, launch.arguments["devices"], launch.num_gpus) == ("litgpt pretrain", "4", 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("##*/", "Qwen2.5-7B.tar.gz"),
        ("#*/", "b/Qwen2.5-7B.tar.gz"),
        ("%%.tar*", "a/b/Qwen2.5-7B"),
        ("%.*", "a/b/Qwen2.5-7B.tar"),
        ("//a/o", "o/b/Qwen2.5-7B.tor.gz"),
        ("/\\//_", "a_b/Qwen2.5-7B.tar.gz"),
        ("/$X/c", "a/c/Qwen2.5-7B.tar.gz"),
        ("/%.gz/", "a/b/Qwen2.5-7B.tar"),
        ("^^", "A/B/QWEN2.5-7B.TAR.GZ"),
        (":4:4", "Qwen"),
        ("/a*z/x", "a/b/Qwen2.5-7B.tar.gz"),  # not followed, which a note says
    ],
)
def test_changes_of_a_variables_text(change, text):
    script = read_script(f"X=b\nM=a/b/Qwen2.5-7B.tar.gz\ntorchrun t.py --m ${{M{change}}}")
    assert script.commands[0].words[-1] == text
    assert bool(script.notes) == ("*z" in change)


def test_an_array_of_a_text_that_is_cut_at_commas():
    """Chinese-Vicuna's finetune.sh."""
    script = read_script("T=0,1,2\nC=(${T//,/ })\ntorchrun --nproc_per_node=${#C[@]} t.py")
    assert script.commands[0].words[1] == "--nproc_per_node=3"


TABLES = """
declare -A LAYERS=([7b]=32 [13b]=40)
declare -A HIDDEN
HIDDEN[7b]=4096
HIDDEN["13b"]=5120
LIST=(a b c)
I=1
read -r BATCH LENGTH REST <<< "4 2048 x y"
let "HEADS = ${HIDDEN[13b]} / 128"
S=13b
torchrun t.py """


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("${LAYERS[$S]}-${HIDDEN[13b]}-${HIDDEN[$S]}", ["40-5120-5120"]),
        ('"${!LAYERS[@]}"', ["7b", "13b"]),
        ("${LIST[$I]}${LIST[$((I+1))]}${LIST[0]}", ["bca"]),
        ("${!LIST[@]}", ["0", "1", "2"]),
        ("$BATCH/$LENGTH/$REST", ["4/2048/x", "y"]),
        ("$HEADS", ["40"]),
        ("$(( ${GPUS:-8} * ${#LIST[@]} ))", ["24"]),
        ("$(printf '%s-%s' $S $I)", ["13b-1"]),
        ("${LAYERS[70b]}x", ["x"]),
    ],
)
def test_tables_of_sizes_are_followed(word, expected):
    script = read_script(TABLES + word)
    assert (list(script.commands[0].words[2:]), script.notes) == (expected, [])


@pytest.mark.parametrize(
    "loop", ["until [ -f done ]", "while ! [ -f done ]", "while true", "while [ $N -lt 3 ]", "until [ $N -ge 3 ]"]
)
def test_a_loop_that_waits_is_left(loop):
    script = read_script(f"N=0\n{loop}; do torchrun t.py --n $N; sleep 5; done\ntorchrun u.py")
    assert [list(command.words) for command in script.commands] == [["torchrun", "t.py", "--n", "0"], ["torchrun", "u.py"]]
    counted = read_script(f"N=0\n{loop}; do torchrun t.py --n $N; N=$((N + 1)); if [ $N == 3 ]; then break; fi; done")
    assert [command.words[-1] for command in counted.commands] == ["0", "1", "2"]
