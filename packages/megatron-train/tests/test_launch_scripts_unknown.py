"""What launch scripts may change unseen, what is noted about it."""

import re

import pytest
from megatron_train.megatron_lm.launch_script import read_script

HOME = {"HOME": "/home/h"}


def read(tmp_path, text, arguments=(), variables=HOME):
    """Reads a script in which `RUN` is a training command."""
    path = tmp_path / "train.sh"
    path.write_text(re.sub(r"\bRUN\b", "python pretrain_gpt.py", text))
    return read_script(path, arguments, variables)


NAMES = ("A", "B", "C", "REPLY", "OPTARG", "OPTIND", "MAPFILE", "PWD", "OLDPWD", "1")
SET = "A=a B=b C=c REPLY=r OPTARG=o OPTIND=i MAPFILE=m PWD=p OLDPWD=q; set -- x\n"


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("for A in 1 2; do :; done", "A"),
        ("for ((A=0; A<3; A++)); do B=1; done", "A B"),
        ("select A in 1; do :; done", "A"),
        ("while read -r A; do B+=x; done < file", "A B REPLY"),
        ("until [ -f x ]; do read; done", "REPLY"),
        ("while true; do A[1]=x; done", "A"),
        ("case $A in x) B=1;; *) C+=(2);; esac", "B C"),
        ("case $A in a) case $B in b) C=1;; esac;; esac", "C"),
        ("if grep -q x y; then A=1; else B=2; fi", "A B"),
        ("if grep -q x; then :; elif [ $B ]; then C=1; fi", "C"),
        ("grep -q x y && A=1 || B=2", "A B"),
        ("grep -q x y && { A=1; B=2; }", "A B"),
        ("grep -q x y && ((A++))", "A"),
        ("grep -q x y && ((A=1))", "A"),
        ("grep -q x y && ((--A))", "A"),
        ('grep -q x y && : ${A:=1} $((B=2)) "${C=3}"', "A B C"),
        ('grep -q x y && : "$((A++))" $((B == 1))', "A B"),
        ('grep -q x y && L=(${A:=1} "$((B--))")', "A B"),
        ("grep -q x y && export A=1 B", "A B"),
        ("grep -q x y && declare A=1", "A"),
        ("grep -q x y && unset A", "A"),
        ("grep -q x y && readonly A=1", "A"),
        ("grep -q x y && typeset A=1", "A"),
        ("grep -q x y && let A=1", "A"),
        ("grep -q x y && printf -v A x", "A"),
        ("grep -q x y && mapfile", "MAPFILE"),
        ("grep -q x y && readarray", "MAPFILE"),
        ("grep -q x y && mapfile A", "A MAPFILE"),
        ("grep -q x y && getopts ab A", "A OPTARG OPTIND"),
        ("grep -q x y && read", "REPLY"),
        ("grep -q x y && cd x", "PWD OLDPWD"),
        ("grep -q x y && pushd x", "PWD OLDPWD"),
        ("grep -q x y && popd", "PWD OLDPWD"),
        ("grep -q x y && set -- 1", "1"),
        ("grep -q x y || shift", "1"),
        ("grep -q x y && echo A $C", ""),
        ("grep -q x y && exec x", ""),
        ("grep -q x y && . x", "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        ("grep -q x y && eval x", "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        ("grep -q x y && source x", "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        ("grep -q x y && trap x EXIT", "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        ("grep -q x y && shopt -s x", "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        ("grep -q x y | A=1", ""),
        ("(read A; B=1)", ""),
        ("f() { A=1; shift; }", ""),
        ("f() { A=1; shift; }; f", "A 1"),
        ("function f { A=1; }; f", "A"),
        ("function f() { A=1; }; g() { f; B=1; }; g", "A B"),
        ("f() { A=1; }; grep -q x y && f", "A"),
        ("f() { A=1; }; if grep -q x y; then f; fi", "A"),
        ("f() { A=1; }; for x in 1; do f; done", "A"),
        ("f() { A=1; }; (f)", ""),
        ("f() { . x; }; f", "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        ("read -r A B", "A B REPLY MAPFILE OPTARG OPTIND"),
        ("mapfile -t A < x", "A REPLY MAPFILE OPTARG OPTIND"),
        ("printf -v A '%s' B", "A REPLY MAPFILE OPTARG OPTIND"),
        ("printf '%s' -v A", ""),
        ("let A=1", "A REPLY MAPFILE OPTARG OPTIND"),
        ("cd x", "PWD OLDPWD"),
        ("pushd x; popd", "PWD OLDPWD"),
        ("source x", "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        (". ./x", "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        ("read $(x)", "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        ('eval "$(x)"', "A B C REPLY OPTARG OPTIND MAPFILE PWD OLDPWD 1"),
        ("A=$(x)", "A"),
        ("A=`x`y", "A"),
        ('A="x$(x)"', "A"),
        ("A+=$(x)", "A"),
        ("A=(b $(x))", ""),
        ("A=(b $(x)); A=${A[1]}", "A"),
        ("A[$(x)]=1", "A"),
        ("A=$?", "A"),
        ("A=$! B=$$ C=$-", "A B C"),
        ("A=$RANDOM B=${HOSTNAME} C=$UID", "A B C"),
        ("A=$((RANDOM))", "A"),
        ("A=${B/x/y} C=${B:1}", "A C"),
        ("A=${!B} C=${B@Q}", "A C"),
        ("A=${#B/x} C=${B^x}", "A C"),
        ("A=${1[0]} C=${@:1:2}", "A C"),
        ("A=${B[$(x)]}", "A"),
        ("A=$(x); B=${A:-x}; C=${A%x}", "A B C"),
        ("A=$(x); B=${#A}; C=$A; : ${A:=x}", "A B C"),
        ("A=$(x); B=${A}y; C=${C}z", "A B"),
        ("A=$(x); B=$((A+1)); C=$((C=2))", "A B"),
        ("A=$(x); : $((B=A))", "A B"),
        ("A=$(x); ((B=A, C++))", "A B C"),
        ("A=$(x); [ $A = x ] && B=1", "A B"),
        ("A=$(x); [[ $A == x ]] && B=1", "A B"),
        ("A=$(x); [[ x == $A ]] && B=1", "A B"),
        ("A=$(x); [[ $A ]] || B=1", "A B"),
        ("A=$(x); [[ $A -gt 1 ]] || B=1", "A B"),
        ("A=$(x); [[ 1 -gt $A ]] || B=1", "A B"),
        ("A=$(x); [[ -n $A ]] || B=1", "A B"),
        ("A=$(x); [[ -v A ]] || B=1", "A B"),
        ("A=$(x); [[ a == b && $A ]] || C=1", "A"),
        ("A=$(x); [[ a == a || $A ]] && [[ -v B ]] || C=1", "A"),
        ("A=$(x); [[ $A && a == b ]] || C=1", "A"),
        ("A=$(x); [[ $A || a == a ]] && B=$A || C=1", "A B"),
        ("A=$(x); [[ ! $A ]] && B=1", "A B"),
        ("[ -f x ] && A=1", "A"),
        ("[ ! -f x ] && A=1", "A"),
        ("[ -f x -a a = a ] || C=1", "C"),
        ("[ -f x -o a = b ] || C=1", "C"),
        ("[ a -nt b ] && A=1", "A"),
        ("[ a \\< b ] && A=1; [[ a < b ]] && B=1; [[ a > b ]] || C=1", "A B C"),
        (
            "[[ a =~ b ]] && A=1; [[ a == [b-a] ]] && B=1; [ 1 -lt 9223372036854775808 ] && C=1",
            "A B C",
        ),
        ("[ -v MAPFILE[0] ] && A=1; test -e x && B=1; [[ -d x ]] && C=1", "A B C"),
        ("x_program || A=1; ! x_program && B=1", "A B"),
        ("x | true && A=y; true | x && B=1", "B"),
        ("set -o pipefail; x | true && A=1; x | false || B=y; false | x || C=z", "A"),
        ("A=$(false) && B=1; A=`x` || C=1", "A B C"),
        ("C=1$(x) A=1; B=2 C=$(x) && B=3", "B C"),
        ("A=$(x) $U || B=1", "A B"),
        ("export A=$(x) && B=c", "A"),
        ("shift $(x)", "1"),
        ("shift x || A=1", "1 A"),
        ("shift 1 2", "1"),
        ("eval 'A=$(x)' && B=1", "A B"),
        ("(exit) && A=1; (exit 0) && B=x", "A"),
        ("(x; exit) && A=1", "A"),
        ('IFS=$(x); A="a b"; B=$A; C=$(echo)', "C"),
    ],
)
def test_exactly_what_may_have_changed_is_unknown(text, unknown, tmp_path):
    words = " ".join(f'"${{{name}}}"' for name in NAMES)
    found = read(tmp_path, f"{SET}{text}\nRUN {words}")
    known = dict(zip(NAMES, found.arguments, strict=True))
    assert " ".join(name for name, value in known.items() if "$" in value) == " ".join(
        name for name in NAMES if name in unknown.split()
    )


LEFT = [  # the words that are left as they are written, and those that are known
    (
        "RUN $(echo \")\" ')' \\) $(echo `date )`)) x",
        ["$(echo \")\" ')' \\) $(echo `date )`))", "x"],
    ),
    ("RUN $(a # )\n b) x", ["$(a # )\n b)", "x"]),
    ("RUN $(a #)\n) x", ["$(a #))", "x"]),
    ("RUN $(a#) x", ["$(a#)", "x"]),
    ('RUN $((a); b) "$(c)" `d \\` e`f', ["$((a); b)", "$(c)", "$(d \\` e)f"]),
    ("RUN $(a ${b:-)} ${c#\")\"} $# $'\\')') x", ["$(a ${b:-)} ${c#\")\"} $# $'\\')')", "x"]),
    ("RUN $(a (b) c) $(cat <<< x) y", ["$(a (b) c)", "$(cat <<< x)", "y"]),
    ("RUN <(echo a) x>(b) y", ["$(<echo a)", "x$(>b)", "y"]),
    ('RUN {a,b} x{1..3} a{b,"c"}', ["$(echo {a,b})", "$(echo x{1..3})", "$(echo a{b,x})"]),
    ("RUN ~user ~user/x", ["$(echo ~user)", "$(echo ~user)/x"]),
    ('A=$(x) L=(a $(y)); RUN a$A"$A" "${L[@]}"', ["a$(x)$(x)", "a", "$(y)"]),
    ('A=$(x y)z; RUN $A "$A" ${A}w', ["$(x y)z", "$(x y)z", "$(x y)zw"]),
    ('L=(a $(y)); RUN "${L[*]}" ${L[0]}', ["a $(y)", "a"]),
    ("IFS=$(x); A='a b'; RUN $A a$A \"$A\" x", ["$(echo a b)", "$(echo aa b)", "a b", "x"]),
    ('IFS=$(x); RUN "$@" "$*" x', ["one", "two", "${*[*]}", "x"]),
    ("A=é; RUN ${A^} ${A,,} ${A^^}x", ["${A^}", "${A,,}", "${A^^}x"]),
    ("A=x; RUN ${A#[b-a]} ${A#[a-Z]} ${A#[A-C]}", ["${A#[b-a]}", "${A#[a-Z]}", "${A#[A-C]}"]),
    ("A=x; RUN ${A#[é-z]} ${A#[0-a]} ${A#[a-]}", ["${A#[é-z]}", "${A#[0-a]}", "x"]),
    ("A=x; RUN ${A#[[.x.]]} ${A#[[=x=]]}", ["${A#[[.x.]]}", "${A#[[=x=]]}"]),
    ("A=x; RUN ${A#[[:none:]]} ${A#[a/]}", ["${A#[[:none:]]}", "${A#[a/]}"]),
    ("A=xabcdefg; RUN ${A#*a*b*c*d*e*f} ${A#*a*b*c*d*e*f*}", ["g", "${A#*a*b*c*d*e*f*}"]),
    ("A=x; RUN ${#U/a} ${!U} ${U@a} ${U~}", ["${#U/a}", "${!U}", "${U@a}", "${U~}"]),
    ('RUN "${A[$(x)]-y}"', ["y"]),
    ('shift $(x); RUN "$@" $# $2 "${@:-a}"', ["${@}", "${#}", "${2}", "${@:-a}"]),
    ('RUN $((RANDOM+1)) "$(($(x)*2))"', ["$((RANDOM+1))", "$(($(x)*2))"]),
    ("exec RUN a", ["a"]),
    ("command RUN a", ["a"]),
    ("python my_pretrain_x.py; python pretrain_gpt.py2; python pretrain-gpt.py; RUN b", ["b"]),
    ("echo python pretrain_gpt.py a; true python train.py; RUN b", ["b"]),
]


@pytest.mark.parametrize(("text", "words"), LEFT)
def test_values_that_only_a_run_has_are_left_as_they_are_written(text, words, tmp_path):
    assert [*read(tmp_path, text, ["one", "two"]).arguments] == words


@pytest.mark.parametrize(
    "program", ["train.py", "x/pretrain_t5.py", "finetune_it.py", "./train_2.py"]
)
def test_a_training_command_has_the_words_around_its_program(program, tmp_path):
    found = read(tmp_path, f"true\nA=1 run -m 2 {program} a\n")
    assert found.program == program.rpartition("/")[2] and found.line == 2
    assert found.launcher == ("run", "-m", "2") and found.arguments == ("a",)


SKIPPED = "a condition cannot be evaluated without running it; its commands are skipped"
NOTES = [
    (
        'cat <<END\n$(date)\nEND\nA=$(date) B=(x\n$(y) z\n) C=$(z) # 5\nD="\n$(w)" E=$(v)\n((1/A))',
        [
            "4: $(date) is not run; it is left unexpanded",
            "5: $(y) is not run; it is left unexpanded",
            "6: $(z) is not run; it is left unexpanded",
            "7: $(w) is not run; it is left unexpanded",
            "8: $(v) is not run; it is left unexpanded",
            "9: $((1/A)) contains a value that is unknown",
        ],
    ),
    ("A=1\\\n2; B=$(x); C=$(x)", ["2: $(x) is not run; it is left unexpanded"]),
    (
        "true\nif [ -f x ]; then\nA=1\nelif x\nthen\nB=1\nelse :\nfi",
        [
            "2: a condition cannot be evaluated without running it; its commands are skipped; "
            "unknown after it: A, B"
        ],
    ),
    (
        "case x in *) A=1 B=2 C=3 D=4 E=5 F=6 G=7 H=8;; esac",
        ["1: 'case' is skipped; unknown after it: A, B, C, D, E, F, G, H"],
    ),
    (
        "\ncase x in *) A=1 B=2 C=3 D=4 E=5 F=6 G=7 H=8 I=9; set x;; esac",
        [
            "2: 'case' is skipped; unknown after it: A, B, C, D, E, F, G, H, ..., "
            "the arguments of the script"
        ],
    ),
    ("for x in 1; do echo; done", ["1: the loop 'for' is skipped; unknown after it: echo, x"]),
    ("while x; do y; done", ["1: the loop 'while' is skipped"]),
    (
        "f() { A=1; }\nf",
        [
            "1: a function is skipped; unknown after it: A",
            "2: the function f is not run",
        ],
    ),
    (
        "function f { . x; }",
        ["1: a function is skipped; all variables are unknown after it"],
    ),
    (
        ". x y z",
        [
            "1: . x is not read; all variables are unknown after it, except those of --set; "
            "remove the line if the file sets none"
        ],
    ),
    ("read A; printf -v B x", ["1: read is not run", "1: printf is not run"]),
    ("$X", []),
    ("x || shift", [f"1: {SKIPPED}; unknown after it: the arguments of the script"]),
    ("x || . y", [f"1: {SKIPPED}; all variables are unknown after it"]),
    ("x || A=1", [f"1: {SKIPPED}; unknown after it: A"]),
    ("x && echo", []),
    ("$(x) y", ["1: $(x) is not run; it is left unexpanded", "1: the command $(x) is unknown"]),
    ("\npython train.py\ntrain.py", ["3: a second training command, train.py, is skipped"]),
    ("echo ~x", ["1: ~x is unknown; give --set HOME=FOLDER"]),
    ("echo ${A/x/y}", ["1: ${A/x/y} is not supported"]),
    ("echo {a,b}", ["1: braces are not expanded: {a,b}"]),
    (
        f"echo $({'x' * 300})",
        [f"1: $({'x' * 118}...{'x' * 85}) is not run; it is left unexpanded"],
    ),
    ("f() { :; }; exit", ["1: a function is skipped"]),
]


@pytest.mark.parametrize(("text", "notes"), NOTES)
def test_notes_have_the_line_and_what_is_unknown(text, notes, tmp_path):
    """A first command keeps later ones, which are noted, from being it."""
    first = "" if "train.py" in text else "python train.py; "
    assert [*read(tmp_path, first + text).notes] == [f"line {note}" for note in notes]


def test_unset_variables_have_the_line_of_their_first_use(tmp_path):
    text = 'U=\necho $V "${W}" ${#L[@]} ${U} ${X-} $((Y))\n[ $V = $Z ]\nRUN ${#P} $1 $W'
    found = read(tmp_path, text)
    assert found.unset == {"V": 2, "W": 2, "Y": 2, "Z": 3, "P": 4, "1": 4}


def test_given_variables_stay_known_after_a_sourced_file(tmp_path):
    found = read(tmp_path, "A=1; . x; RUN $HOME $A $HOSTNAME", (), {"HOME": "/h", "HOSTNAME": "n"})
    assert found.arguments == ("/h", "${A}", "n")
