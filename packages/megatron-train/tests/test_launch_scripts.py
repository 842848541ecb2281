"""Launch scripts of Megatron-LM: the command that is read equals the one that Bash runs."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml
from fuzzing import fuzz, mutate_bytes
from megatron_train.cli import main
from megatron_train.errors import TrainError
from megatron_train.megatron_lm.bash.escapes import unescape
from megatron_train.megatron_lm.launch_script import read_script
from megatron_train.megatron_lm.table import megatron_flags
from megatron_train.megatron_lm.translate import translate
from random_scripts import answers_of_bash, write_scripts

LISTS = Path(__file__).parent / "megatron_flags"
TABLE = megatron_flags()
HOME = {"HOME": "/home/h"}
SCRIPT = r"""#!/bin/bash
# A launch script in the style of Megatron-LM's.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
GPUS=2; NODES=${SLURM_NODES:-1}
WORLD=$(($GPUS*NODES + 0))
SAVE=${1:-"ckpt/run one"}  # with a space
TOKENIZER=${2:-"MOCK"}
NAME="llama"
mkdir -p "$(dirname "$SAVE")"
LAUNCH=(--nproc_per_node $GPUS --nnodes "$NODES")
MODEL=(
    --num-layers 2 --hidden-size 32   # sizes
    --num-attention-heads 4 \
    --group-query-attention --num-query-groups 2
    --swiglu --seq-length 32 --max-position-embeddings 32
    # --kv-channels 3
)
MORE="
    --micro-batch-size 1 \
    --global-batch-size $WORLD --sequence-parallel
"
TYPE=()
if [[ "$NAME" == "llama" && -n $TOKENIZER ]]; then
    TYPE+=("--fp8-quantizer-factory a.b" "--fp8-param-gather")
elif [ $GPUS -gt 8 ]; then
    TYPE+=(--bf16)
fi
if [ "$TOKENIZER" = "MOCK" ] || [[ -z "$TOKENIZER" ]]; then
    TYPE+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 64" "--split '99,1,0'")
else
    TYPE+=(--data-path "$3" --tokenizer-model "$TOKENIZER")
fi
[ -z "$NOTHING" ] && MORE+=" --train-iters 3"
[ $GPUS -eq 1 ] || MORE="$MORE --lr 1e-3"
FILE=runs/${NAME}_v1.tar.gz
MODEL+=(--tensorboard-dir "${FILE%.tar*}/${NAME}" --manual-gc --tiktoken-pattern v2)
echo "starting"
torchrun ${LAUNCH[@]} path/pretrain_gpt.py \
    ${MODEL[@]} $MORE \
    ${TYPE[@]} --eval-iters 0 --save "$SAVE" --log-interval=1 2>&1 | tee log.txt
"""
ARGUMENTS = [[], ["out"], ["out", "tok.model", "corpus file"]]


def write(tmp_path, text):
    path = tmp_path / "train.sh"
    path.write_text(text)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=len)
def test_a_script_is_read_as_bash_runs_it(arguments, tmp_path):
    path = write(tmp_path, SCRIPT)
    function = "torchrun() { printf '%s\\0' \"$@\" >&3; }; tee() { :; }; "
    run = ["bash", "-c", f"{function} exec 3>words; source {path}", "bash", *arguments]
    subprocess.run(run, cwd=tmp_path, check=True, env={"PATH": "/usr/bin:/bin"}, timeout=60)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    found = read_script(path, arguments)
    assert [*found.launcher[1:], "path/" + found.program, *found.arguments] == words
    assert found.unset == {"NOTHING": 33}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_positional_parameters_are_those_of_bash(tmp_path, monkeypatch):
    words = [f"w{number}" for number in range(1, 13)]
    names = ("00", "0000", "1", "01", "009", "12", "13", "9" * 9)
    asked = " ".join(f"${{{name}-none}}" for name in names)
    write(tmp_path, f"torchrun pretrain_gpt.py $0 $# {asked} $10 ${{3-x}}\n")
    monkeypatch.chdir(tmp_path)
    printing = {"BASH_FUNC_torchrun%%": '() { printf "%s\\n" "$@"; }'}
    run = ["bash", "train.sh", *words]
    done = subprocess.run(run, capture_output=True, text=True, env=printing, timeout=60)
    found = read_script(Path("train.sh"), words)
    assert [found.program, *found.arguments] == done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\x7f\001\u20ac\ud7ff\U0000d7ff", "\x7f\x01€\ud7ff\ud7ff"),
        (r"\n\t\'\q", "\n\t'\\q"),
        *((text, None) for text in (r"\x80", r"\200", r"\0", r"\ud800", r"\U0001f600", r"\cA")),
    ],
)
def test_escapes_of_quoted_text(text, content):
    assert unescape(text) == content


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1; { A=2; }; run $A", ["2"]),
        ("A=1; (A=2; exit 3); run $A", ["1"]),
        ("A=1; (A=2; run $A)", ["2"]),
    ],
)
def test_groups_change_variables_and_subshells_do_not(text, words, tmp_path):
    path = write(tmp_path, text.replace("run", "torchrun pretrain_gpt.py") + "\n")
    assert [*read_script(path, []).arguments] == words


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_text_of_here_documents_is_no_command(tmp_path):
    script = """cat <<'ONE' <<-TWO > notes
    ONE
pretrain_gpt.py --lr 1 "unbalanced $(
ONE
ONE
\tpretrain_gpt.py --lr 2
\t\tTWO
python pretrain_gpt.py --lr 3 <<END
END
"""
    path = write(tmp_path, script)
    printing = {"BASH_FUNC_python%%": '() { echo "$@"; }', "PATH": "/usr/bin:/bin"}
    run = ["bash", "train.sh"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, env=printing)
    found = read_script(path)
    assert done.stdout.split() == [found.program, *found.arguments], done.stderr
    assert [*found.arguments] == ["--lr", "3"]


def test_constructs_that_cannot_be_evaluated_are_noted(tmp_path):
    text = """for x in 1 2; do A=3; done
if [ -f here ]; then B=1; fi
case $C in a) D=1;; esac
function f { torchrun pretrain_gpt.py --lost; }
source other.sh
E=$(date) F=${E#x} G=${H^^x}
python3 train_it.py --save $E --load $F --seed 1
python3 pretrain_gpt.py --second
"""
    found = read_script(write(tmp_path, text))
    assert found.arguments == ("--save", "$(date)", "--load", "${E#x}", "--seed", "1")
    lines = [note.split(": ")[0] for note in found.notes]
    assert lines == [f"line {n}" for n in (1, 2, 3, 4, 5, 6, 6, 8)]
    assert "'for' is skipped" in found.notes[0] and "skipped" in found.notes[1]
    errors = translate(found.arguments, TABLE).errors
    assert errors[0].startswith("--save $(date): the value is only known when the script runs;")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=$((1/0))", "line 1: $((1/0)) cannot be calculated: a division by 0"),
        ("\nA=$[1]", "line 2: $[...] is not supported"),
        ("A=1\r\n", "line 1: the character '\\r' is not supported"),
        ("shopt -s nullglob", "line 1: 'shopt -s nullglob' is not supported"),
        (f"shopt -s {'x' * 212}", f"line 1: 'shopt -s {'x' * 212}' is not supported"),
        (
            f"shopt -s {'x' * 213}",
            f"line 1: 'shopt -s {'x' * 110}...{'x' * 102}' is not supported",
        ),
        ("echo ${A:?give a size}", "line 1: ${A:?...} ends the script: give a size"),
        ("set -u\necho $A", "line 2: A is not set, where the script ends because of 'set -u'"),
        (
            "set -e\nfalse\npython pretrain_gpt.py",
            "line 2: the script ends here because of 'set -e'",
        ),
        ("echo 'hello", "line 1: ' is missing at the end"),
        ("A=(1 2\n", "line 2: ) is missing at the end"),
        ("if true; then echo\n", "line 1: 'fi' is missing after 'if'"),
        ("\n)", "line 2: unexpected ')'"),
        (f"echo ${{{'1' * 5000}}}", "starts no program such as pretrain_gpt.py"),
        ('A=$(date "\n")', "starts no program such as pretrain_gpt.py; line 1: $(date"),
        ("echo pretrain_gpt.py.txt", "starts no program such as pretrain_gpt.py"),
        ("A=xxxxxxxxxxxxxxxx\n" + "A=$A$A$A$A\n" * 20, "a value has more than"),
        ('X="$(' * 50, "is missing at the end"),
    ],
)
def test_an_invalid_script_gives_one_line(text, message, tmp_path):
    with pytest.raises(TrainError) as caught:
        read_script(write(tmp_path, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_fuzzed_scripts_are_read_or_refused(tmp_path, fuzz_count):
    def read(content: bytes) -> None:
        path = tmp_path / "train.sh"
        path.write_bytes(content)
        translate(read_script(path, ["out"]).arguments, TABLE)

    fuzz(read, [SCRIPT.encode()], TrainError, count=fuzz_count, mutate=mutate_bytes)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_scripts_are_read_as_bash_runs_them(count, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    scripts = write_scripts(tmp_path, [f"g/{index}" for index in range(count)])
    different, without = [], 0
    for (path, arguments), words in zip(scripts, answers_of_bash(scripts, empty), strict=True):
        try:
            found = read_script(path, arguments, HOME)
            read = [found.program, *found.arguments]
        except TrainError as error:
            read = None if words is None else [str(error)]
        without += words is None
        if read != words:
            different.append(f"{path.read_text()}\nBash: {words}\nread: {read}")
    print(f"{count - len(different)} of {count} equal Bash; {without} start no training")
    assert not different and without < count // 10, different[0]


EXPRESSIONS = (
    *("10 + -7/2", "-7 % 3", "7 % -3", "-9223372036854775808 / -1", "9223372036854775807 + 1"),
    *("2**63", "3**41", "1 << 65", "1 << -1", "-8 >> 1", "010 + 0x1F + 2#101 + 64#_", "!5 + ~5"),
    *("1 ? 2 : 3 ? 4 : 5", "0 || 2 && 3", "1 | 6 ^ 3 & 5", "A = B = 4, A + B", "A++ + ++A", "- -3"),
    *("-2 ** 2", "2 ** 3 ** 2", "99999999999999999999", "5 > 3 == 1", "0 && (A = 9), A", ""),
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_arithmetic_is_that_of_bash(tmp_path):
    words = " ".join(f"$(({expression}))" for expression in EXPRESSIONS)
    path = write(tmp_path, f"python3 pretrain_gpt.py {words}")
    ((bash,), found) = answers_of_bash([(path, [])], tmp_path), read_script(path)
    assert [found.program, *found.arguments] == bash and len(bash) == len(EXPRESSIONS) + 1


EMPTY = """EXTRA=() X= S='-1'
python pretrain_gpt.py "$@" "${EXTRA[@]}" "$X$@" "$X" "${EXTRA[*]}" \\
    ${EXTRA[@]+"${EXTRA[@]}"} ${X:-""} ${X}
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_an_empty_list_is_no_word(tmp_path):
    path = write(tmp_path, EMPTY)
    bash = answers_of_bash([(path, [])], tmp_path)[0]
    found = read_script(path)
    assert [found.program, *found.arguments] == bash == ["pretrain_gpt.py", "", "", ""]


@pytest.mark.parametrize(
    "text",
    [
        "for x in 1; do A=3; done",
        "if [ -f here ]; then A=3; fi",
        "[ -f here ] && A=3",
        "grep -q x y || A=3",
        "case $1 in a) A=3;; esac",
        "source other.sh",
        "read A",
        "f() { A=3; }; f",
        "while shift; do ((A++)); done",
        'printf -v A "%d" 3',
        "A=$(date)",
    ],
)
def test_what_a_skipped_construct_may_change_is_unknown(text, tmp_path):
    found = read_script(write(tmp_path, f"A=1\n{text}\npython pretrain_gpt.py --lr $A"))
    assert found.arguments[1] != "1" and found.arguments[1].startswith("$")
    (error,) = translate(found.arguments, TABLE).errors
    assert "the value is only known when the script runs" in error


def test_a_pattern_that_matches_files_is_unknown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.bin").touch()
    path = write(tmp_path, "python pretrain_gpt.py --data-path *.bin --split [0]*3")
    assert read_script(path).arguments == ("--data-path", "$(echo *.bin)", "--split", "[0]*3")


def test_flags_are_sorted_by_outcome():
    words = "--num-layers 2 --manual-gc --fp8-param-gather --padded-vocab-size 7 --lr=1e-3 "
    words += "--new-thing 1 2"
    result = translate(words.split(), TABLE)
    assert result.counts() == {
        "accepted": 2,
        "no effect": 1,
        "dropped": 0,
        "planned": 1,
        "refused": 1,
        "unknown": 1,
    }
    assert result.arguments == ["--num-layers", "2", "--lr", "1e-3"]
    assert result.errors[0] == TABLE["--fp8-param-gather"].message() and len(result.errors) == 3
    dropped = translate(
        words.split(), TABLE, ["--fp8-param-gather", "--new-thing", "--padded-vocab-size"]
    )
    assert not dropped.errors and dropped.counts()["dropped"] == 3


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("2 --num-layers 2", "'2' does not follow a flag"),
        ("--num-layers --lr 1", "--num-layers has no value: its variable is empty"),
        ("--num-layers 2 3", "--num-layers 2 3: the flag takes 1 values, got 2"),
        ("--moe-router-score-function tanh", "--moe-router-score-function tanh is not supported"),
        ("--append-eod", "--append-eod is a flag of megatron-data preprocess"),
    ],
)
def test_an_invalid_command_line_is_refused(words, error):
    (line,) = translate(words.split(), TABLE).errors
    assert line.startswith(error)


def test_query_groups_need_their_switch_as_in_megatron():
    result = translate(["--num-query-groups", "2", "--seed", "1"], TABLE)
    assert result.arguments == ["--seed", "1"] and "no effect in Megatron-LM" in result.notes[0]


def test_the_command_writes_settings_and_reports_outcomes(tmp_path, capsys):
    script, output = write(tmp_path, SCRIPT), tmp_path / "run.yaml"
    words = ["config", "from-megatron", str(script), "out", "--output", str(output)]
    assert main(words) == 1
    shown = capsys.readouterr()
    errors = shown.err.splitlines()
    assert len(errors) == 3 and "--fp8-quantizer-factory is not supported yet" in errors[0]
    assert "planned       2  --fp8-quantizer-factory --fp8-param-gather" in shown.out
    assert "unknown       0" in shown.out and not output.exists()
    assert "note: --drop FLAG leaves a flag out, which changes the run\n" in shown.out
    assert main([*words, "--drop", "--fp8-quantizer-factory", "--drop", "--fp8-param-gather"]) == 0
    shown = capsys.readouterr()
    assert f"pretrain gpt --config {output} --nproc-per-node 2" in shown.out and not shown.err
    assert "--manual-gc: no effect here: Python manages garbage collection" in shown.out
    found = yaml.safe_load(output.read_text())
    assert found["model"] == {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "activation": "swiglu",
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
    assert found["data"]["split"] == "99,1,0" and found["data"]["mock_data"] is True
    assert "tiktoken_pattern" not in found["data"]
    assert found["training"]["calculate_per_token_loss"] is False
    assert main(["pretrain", "gpt", "--config", str(output), "--print-config"]) == 0
    assert "--sequence-parallel has no effect" in capsys.readouterr().err


def test_without_a_file_the_settings_alone_are_on_standard_output(tmp_path, capsys):
    script = write(tmp_path, "python pretrain_gpt.py --num-layers 2 --lr 1e-3\n")
    assert main(["config", "from-megatron", str(script)]) == 0
    printed = capsys.readouterr()
    found = yaml.safe_load(printed.out)
    assert found["model"]["num_layers"] == 2 and float(found["optimizer"]["lr"]) == 1e-3
    assert "train.sh" in printed.err and "num_layers" not in printed.err
    assert "--drop" not in printed.err  # no flag is planned or refused


def test_a_script_of_another_kind_of_model_becomes_a_file_of_that_kind(tmp_path, capsys):
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mask-prob 0.2 "
    flags += "--bert-no-binary-head --micro-batch-size 1 --train-iters 3 --lr 1 --eval-iters 0 "
    flags += "--data-path d --vocab-file v.txt"
    script, output = write(tmp_path, f"python pretrain_bert.py {flags}"), tmp_path / "bert.yaml"
    assert main(["config", "from-megatron", str(script), "--output", str(output)]) == 0
    assert "megatron-train pretrain bert --config" in capsys.readouterr().out
    found = yaml.safe_load(output.read_text())
    assert found["kind"] == "bert" and found["model"]["bert_binary_head"] is False
    assert found["masking"] == {"mask_prob": 0.2}
    command = ["pretrain", "bert", "--config", str(output), "--vocab-size", "9", "--print-config"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "tokenizer_type: BertWordPieceLowerCase" in printed
    assert main([*command[:1], "gpt", *command[2:]]) == 1
    assert "is for models of kind bert, not gpt" in capsys.readouterr().err


def test_mistakes_of_the_command_give_one_line_each(tmp_path, capsys):
    script = write(tmp_path, "python pretrain_ict.py --lr fast --num-layers x --seed 1")
    assert main(["config", "from-megatron", str(script), "--drop", "fp16"]) == 1
    error = capsys.readouterr().err
    for part in (
        "--drop --fp16: the script does not use this flag",
        "pretrain_ict.py is not supported yet",
        "error: --num-layers needs an integer, got 'x'",
        "error: --lr needs a number, got 'fast'",
        "error: 4 settings cannot be used",
    ):
        assert part in error
    assert main(["config", "from-megatron", str(script), "--set", "x"]) == 2


def flags_of_scripts():
    flags: dict[str, list[str]] = {}
    for line in (LISTS / "scripts.txt").read_text().splitlines():
        if line.startswith("--"):
            flags[script].append(line)  # noqa: F821 - a script stands before its flags
        elif not line.startswith("#"):
            script = line
            flags[script] = []
    return flags


def test_the_page_has_the_counts_of_the_example_scripts():
    page = Path(__file__).parents[3] / "docs" / "from-megatron.md"
    for script, flags in flags_of_scripts().items():
        kind = script.split("/")[0]
        own = {name for name, f in TABLE.items() if f"megatron-train pretrain {kind}" in f.commands}
        kinds = Counter(
            "accepted" if TABLE[f].accepted or f in own else TABLE[f].status for f in flags
        )
        kinds["no effect"] = sum(TABLE[f].status == "no effect" for f in flags)
        kinds["accepted"] -= kinds["no effect"]
        columns = [kinds[name] for name in ("accepted", "no effect", "planned", "refused")]
        row = f"| `{script}` | {len(flags)} | {' | '.join(map(str, columns))} | 0 |"
        assert sum(columns) == len(flags)
        if page.parent.exists():
            assert row in page.read_text(), row


def test_the_page_has_the_counts_of_the_flags_of_megatron_bridge():
    lines = (LISTS / "bridge.txt").read_text().splitlines()
    names = [line for line in lines if line.startswith("--")]
    rows, more = names[:230], names[230:]
    page = Path(__file__).parents[3] / "docs" / "from-megatron.md"
    for title, flags in (
        ("230 rows", rows),
        ("196 flags of the rows", set(rows)),
        ("73 more flags", more),
    ):
        kinds = Counter(TABLE[flag].status for flag in flags)
        columns = [kinds["works"] + kinds["alias"], *map(kinds.get, ("no effect", "planned"))]
        row = f"| {title} | {' | '.join(map(str, [*columns, kinds['refused']]))} |"
        assert sum(kinds.values()) == int(title.split()[0])
        if page.parent.exists():
            assert row in page.read_text(), row
