"""Launch scripts that are refused, and the limits of what is read."""

import re
import string

import pytest
from megatron_train.errors import TrainError
from megatron_train.megatron_lm.bash.escapes import unescape
from megatron_train.megatron_lm.bash.patterns import to_regex
from megatron_train.megatron_lm.launch_script import read_script


def read(tmp_path, text):
    """Reads a script in which `RUN` is a training command."""
    path = tmp_path / "train.sh"
    path.write_text(re.sub(r"\bRUN\b", "python pretrain_gpt.py", text))
    return read_script(path, ["one"])


REFUSED = [
    ("\nA=1\r", "line 2: the character '\\r' is not supported; remove it"),
    ("A=(((1)))", "line 1: unexpected '(' in an array"),
    ("A=(1; 2)", "line 1: unexpected ';' in an array"),
    ("A=(\n[a\n)", "line 2: '[' at the start of an element is not supported; quote it"),
    ("A=([ab]c=d)", "line 1: '[' at the start of an element is not supported; quote it"),
    ("((a) b)", "line 1: '((' that is no arithmetic command is not supported; write '( ('"),
    ("cat <<", "line 1: the end mark of a here-document is missing"),
    ("cat << \nx", "line 1: the end mark of a here-document is missing"),
    ("echo $'\\x80'", "line 1: $'\\x80' is not supported"),
    ('echo "a\nb', 'line 2: " is missing at the end'),
    ("echo `a", "line 1: ` is missing at the end"),
    ("echo $'a", "line 1: ' is missing at the end"),
    ("echo ${a", "line 1: } is missing at the end"),
    ("echo $((1)", "line 1: ) is missing at the end"),
    ('echo "$(a', "line 1: ) is missing at the end"),
    ("echo $(case x in x) ;; esac)", "line 1: 'case' and here-documents in $(...) are not supp"),
    ("echo $(cat <<END\nEND\n)", "'case' and here-documents in $(...) are not supported"),
    ("echo $(cat <<-END\nEND\n)", "'case' and here-documents in $(...) are not supported"),
    ("\nfi", "line 2: unexpected 'fi'"),
    ("\n&& a", "line 2: unexpected '&&'"),
    ("a | ", "line 1: a command is missing at the end"),
    ("a\n| b", "line 2: unexpected '|'"),
    ("a | | b", "line 1: unexpected '|'"),
    ("a &&", "line 1: a command is missing after &&"),
    ("a ||\n\n", "line 1: a command is missing after ||"),
    ("{ }", "line 1: unexpected '}'"),
    ("( )", "line 1: unexpected ')'"),
    ("if true; then fi", "line 1: unexpected 'fi'"),
    ("if true; fi", "line 1: unexpected 'fi'"),
    ("{ a", "line 1: '}' is missing after '{'"),
    ("( a", "line 1: ')' is missing after '('"),
    ("while a; b", "line 1: 'do' is missing after 'while'"),
    ("for a in b; do c", "line 1: 'done' is missing after 'for'"),
    ("\ncase a in", "line 2: 'esac' is missing after 'case'"),
    ("f() (", "line 1: a command is missing at the end"),
    ("function f ( a", "line 1: ')' is missing"),
    ("a (b)", "line 1: unexpected '('"),
    ("a ((b))", "line 1: unexpected 'b'"),
    ("a >", "line 1: a command is missing at the end"),
    ("a > | b", "line 1: unexpected '|'"),
    ("coproc a", "line 1: unexpected 'coproc'"),
    ("time a", "line 1: unexpected 'time'"),
    ("a || fi", "line 1: unexpected 'fi'"),
    ("[[ a", "line 1: ']]' is missing after '[['"),
    ("\n[[ a ((b)) ]]", "line 2: '((' in [[ is not supported"),
    ("\n[[ ]]", "line 2: unexpected ']]' in a condition"),
    ("[[ a b ]]", "line 1: unexpected 'b' in a condition"),
    ("[[ a == ]]", "line 1: unexpected ']]' in a condition"),
    ("[[ ( a ]]", "line 1: unexpected ']]' in a condition"),
    ("[[ a\n&& ]]", "line 2: unexpected ']]' in a condition"),
    ("[[ && a ]]", "line 1: unexpected '&&' in a condition"),
    ("\n[[ -z ( ]]", "line 2: unexpected '(' in a condition"),
    ("[[ < a ]]", "line 1: unexpected '<' in a condition"),
    ("(( 1 + ))", "line 1: $(( 1 + )) cannot be calculated: unexpected ''"),
    ("\n((1 2))", "line 2: $((1 2)) cannot be calculated: unexpected '2'"),
    ("((1 ? 2))", "cannot be calculated: ':' is missing"),
    ("(((1) )) )", "line 1: unexpected ')'"),
    ("((1 @ 2))", "cannot be calculated: unexpected ' @ 2'"),
    ("((1 ? A : B = 2))", "cannot be calculated: an assignment to a value"),
    ("((++))", "cannot be calculated: an operand is missing"),
    ("((2 ** -1))", "cannot be calculated: a negative exponent"),
    ("((1 % 0))", "cannot be calculated: a division by 0"),
    ("((1#1))", "cannot be calculated: the base of 1#1"),
    ("((65#1))", "cannot be calculated: the base of 65#1"),
    ("((02#1))", "cannot be calculated: the base of 02#1"),
    ("((08))", "cannot be calculated: the digit 8"),
    ("((2#2))", "cannot be calculated: the digit 2"),
    ("((16#g))", "cannot be calculated: the digit g"),
    ("((63#_))", "cannot be calculated: the digit _"),
    ("((62#@))", "cannot be calculated: the digit @"),
    ("A=A; ((A))", "cannot be calculated: the expression is too long"),
    (f"(({'1+' * 200}1))", "cannot be calculated: the expression is too long"),
    ("A=x/y; set -f; echo \"a\"/$A\\\\ /${A}\\\\*$'\\\\'$B", "starts no program"),
    (
        "A='/\\x'; echo $A",
        "line 1: a path with a backslash from a variable is not supported: '/\\\\x'",
    ),
    ('echo ~"a"', "line 1: '~' before a quote or variable is not supported"),
    ("echo ${2?}", "${2?...} ends the script: it is not set; give arguments of the script or"),
    ("A=; echo ${A:?x $((1+1))}", "${A:?...} ends the script: x 2; give arguments"),
    ("echo ${2=a}", "line 1: ${2=...} cannot be assigned"),
    ("echo ${A[1]:=a}", "line 1: ${A:=...} cannot be assigned"),
    ("set -u; echo ${A[1]}", "line 1: A is not set, where the script ends because of 'set -u'"),
    ("set -u; echo $((A))", "line 1: A is not set, where the script ends because of 'set -u'"),
    ("set -u; echo ${#A}", "line 1: A is not set, where the script ends because of 'set -u'"),
    ("set -u; echo ${A%x}", "line 1: A is not set, where the script ends because of 'set -u'"),
    ("readonly A=1\nA=2", "line 2: A is read-only; remove the second assignment"),
    ("declare -r A=1\nA+=2", "line 2: A is read-only; remove the second assignment"),
    ("A=1; readonly A\nunset A", "line 2: A is read-only and cannot be removed"),
    ("readonly A=1; (A=2)", "line 1: A is read-only; remove the second assignment"),
    ("L=(a); L[-2]=b", "line 1: the index -1 of L is out of range"),
    ("L[10001]=b", "line 1: the index 10001 of L is out of range"),
    ("local A=1", "line 1: 'local' outside of a function is not supported"),
    ("declare -A L", "line 1: 'declare -A' is not supported"),
    ("export -p", "line 1: 'export -p' is not supported"),
    ("declare +x A", "line 1: 'declare +x' is not supported"),
    ("declare -a A=1", "line 1: 'declare -a NAME=' is not supported"),
    ("export 1x", "line 1: 'export 1x' is not supported"),
    ("unset A[x]", "line 1: 'unset A[x]' is not supported"),
    ("unset 1", "line 1: 'unset 1' is not supported"),
    ("set -k", "line 1: 'set' with the option 'k' is not supported"),
    ("set +B", "line 1: 'set' with the option 'B' is not supported"),
    ("set -o posix", "line 1: 'set' with the option 'posix' is not supported"),
    ("set -o", "line 1: 'set' with the option '' is not supported"),
    ("set -$(x)", "line 1: 'set' with unknown options is not supported"),
    ("shopt -u expand_aliases", "line 1: 'shopt -u expand_aliases' is not supported"),
    ("shopt -s a b c", "line 1: 'shopt -s a' is not supported"),
    ("\nbreak", "line 2: 'break' is not supported"),
    ("alias a=b", "line 1: 'alias' is not supported"),
    ("command export A=1", "line 1: 'command export' is not supported"),
    ("builtin declare A", "line 1: 'builtin declare' is not supported"),
    ("A=1 eval x", "line 1: an assignment before eval is not supported"),
    ("A=1 . x", "line 1: an assignment before . is not supported"),
    ('set -- a; : ${U-x"$@"}', 'line 1: text beside "$@" in a default is not supported'),
    ('set -- a b; A=x; IFS=:; B="${@#a}"', "line 1: a changed ${@...} in an assignment is not"),
    ("set -- a b; IFS=; : ${*#a}", "line 1: a changed ${*...} is not supported while IFS is empty"),
    ('A=1; : "${*#a}$A"', 'line 1: a changed ${*...} beside other variables in "..." is not'),
    ("set -- a b; IFS=:; : ${U-$@}", "line 1: ${@} without quotes in a default is not supported"),
    ('A=; : "${A=x}$@"', "starts no program"),
    ('set --; : "${A:=}$@"', 'line 1: an empty "$@" beside this expansion in quotes is not'),
    ("set -e\nfalse", "; line 2: the script ends here because of 'set -e'"),
    ("true\nexit 3", "; line 2: the script ends here"),
    (f"{'command ' * 1500}true", "the script is nested too deeply"),
    (f"(({'(' * 180}1{')' * 180}))", " cannot be calculated: "),
    (
        "$(a)\n$(b)\n$(c)",
        "unexpanded; line 1: the command $(a) is unknown; line 2: $(b) is not run;",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_with_its_line(text, message, tmp_path):
    with pytest.raises(TrainError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


BLOCK = f"A={'x' * (1 << 15)}"
WORDS = "[ " + "! " * 198
CHAIN = "; ".join(f"A{index}=A{index + 1}" for index in range(1, 30))
LIMITS = [  # the largest script that is read, the next larger one, and what is said about it
    ("A=(" * 40 + ")" * 40, "A=(" * 41 + ")" * 41, "nesting is deeper than 40 levels"),
    (
        "{ " * 39 + ":" + "; }" * 39,
        "{ " * 40 + ":" + "; }" * 40,
        "commands are nested deeper than 40",
    ),
    (
        "A=" + "${A-" * 20 + "}" * 20,
        "A=" + "${A-" * 21 + "}" * 21,
        "variables are nested too deeply",
    ),
    ("A=" + "$(" * 41 + ")" * 41, "A=" + "$(" * 42 + ")" * 42, ") is missing at the end"),
    ("A=" + "x" * 65534, "A=" + "x" * 65535, "a value has more than 65536 characters"),
    ("RUN_ " + "x" * 65536, ": " + "x" * 65537, "a value has more than 65536 characters"),
    (
        f"{BLOCK}; B={'; B+=$A' * 32}",
        f"{BLOCK}; B={'; B+=$A' * 32}; B+=x",
        "the value of B is too long",
    ),
    (
        f"{BLOCK}; B=(){'; B+=($A)' * 32}",
        f"{BLOCK}; B=(){'; B+=($A)' * 32}; B+=(x)",
        "the value of B is too long",
    ),
    ("L[10000]=x", "L[10001]=x", "the index 10001 of L is out of range"),
    ("((  " + "1+" * 198 + "1 ))", "((   " + "1+" * 198 + "1 ))", "the expression is too long"),
    (f"{CHAIN}; ((A7))", f"{CHAIN}; ((A6))", "the expression is too long"),
    ("#" * (1 << 20), "#" * ((1 << 20) + 1), "has more than 1048576 bytes"),
]


@pytest.mark.parametrize(("largest", "larger", "message"), LIMITS, ids=[each[2] for each in LIMITS])
def test_a_script_is_read_up_to_a_limit(largest, larger, message, tmp_path):
    for text, expected in ((largest, "starts no program"), (larger, message)):
        with pytest.raises(TrainError) as caught:
            read(tmp_path, text)
        assert expected in str(caught.value)


@pytest.mark.parametrize("text", [":\n:\n{0}", "( : ) && {0}", "if :; then {0}; fi", "{{ {0}; }}"])
def test_a_script_has_a_limited_number_of_commands(text, tmp_path, monkeypatch):
    """Groups and conditions count with their commands; those of a subshell in it alone."""
    limit = "megatron_train.megatron_lm.bash.interpreter._MOST_COMMANDS"
    count = {":": 3, "(": 2, "i": 3, "{": 2}[text[0]]
    for most, refused in ((count, False), (count - 1, True)):
        monkeypatch.setattr(limit, most)
        if refused:
            with pytest.raises(TrainError, match=r"line \d: the script has too many commands"):
                read(tmp_path, text.format("RUN a"))
        else:
            assert read(tmp_path, text.format("RUN a")).arguments == ("a",)


@pytest.mark.parametrize(
    ("known", "unknown"),
    [
        (f"{WORDS} ! a ] || A=1", f"{WORDS} ! ! a ] || A=1"),
        (f"[[ {'! ' * 199}a ]] || A=1", f"[[ {'! ' * 200}a ]] || A=1"),
        (f"A={'x' * 4096}; A=1${{A##*}}", f"A={'x' * 4097}; A=1${{A##*}}"),
        (f"[[ a == a{'x' * 999} ]] || A=1", f"[[ a == a{'x' * 1000} ]] || A=1"),
        ("[[ a == *a*b*c*d*e* ]] || A=1", "[[ a == *a*b*c*d*e*f* ]] || A=1"),
        ("[ 9223372036854775807 -lt 1 ] || A=1", "[ 9223372036854775808 -lt 1 ] || A=1"),
        ("[ 1 -gt 9223372036854775807 ] || A=1", "[ 1 -gt 9223372036854775808 ] || A=1"),
        ("shift 9999 || A=1", "shift 10000 || A=1"),
    ],
    ids=range(8),
)
def test_a_condition_is_known_up_to_a_limit(known, unknown, tmp_path):
    assert read(tmp_path, f"A=0\n{known}\nRUN $A").arguments == ("1",)
    assert read(tmp_path, f"A=0\n{unknown}\nRUN $A").arguments != ("1",)


FILES = ("data.bin", ".hidden", "sub/x.txt", "sub/y", "deep/a/b", "z.bin", "sub/z", "deep/a/c")
"""Files before and after folders, in every order in which a folder may list them."""


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        *(("*.bin", True), ("*.txt", False), ("*/x.txt", True), ("sub/?", True), ("sub/??", False)),
        *((".h*", True), ("*hidden", False), ("?hidden", False), ("[.]hidden", False)),
        *(("[d]ata*", True), ("[!d]ata*", False), ("*/a/b", True), ("*/b", False), ("*/*/b", True)),
        *(("no/*", False), ("'*'.bin", False), ("*'.bin'", True), ("*.bin/x", False)),
        *(("./*.bin", True), ("*", True), ("sub//*", True), ("data.bin[", False), ("x?", False)),
        *(("sub/'x'*", True), ("sub/'*'?", False), ("s'u'b/?", True)),
        *(("HERE/*.bin", True), ("HERE/*.txt", False), ("/no/*", False), ("*/", True)),
        *(("sub/[[:no:]]", True), ("sub/[b-a]", True), ("/*/*/no-such-name", False)),
    ],
)
def test_a_pattern_is_unknown_if_it_matches_files(pattern, matches, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    monkeypatch.chdir(folder)
    pattern = pattern.replace("HERE", str(folder))
    (word,) = read(tmp_path, f"RUN {pattern}").arguments
    plain = pattern.replace("'", "")
    assert word == (f"$(echo {plain})" if matches else plain)


@pytest.mark.parametrize("command", ["export", "unset", "declare", "readonly"])
def test_a_long_word_is_shortened_in_an_error(command, tmp_path):
    for count in (200, 3000):
        with pytest.raises(TrainError) as caught:
            read(tmp_path, f"{command} {'9' * count}")
        shown = str(caught.value).partition(": line 1: ")[2]
        whole = f"'{command} {'9' * count}' is not supported"
        assert shown == (whole if len(whole) <= 240 else f"{whole[:120]}...{whole[-120:]}")


def code(text):
    """Returns which ASCII characters a pattern of one character matches."""
    regex = re.compile(to_regex([(text, False)]), re.S)
    return "".join(each for each in map(chr, range(128)) if regex.fullmatch(each))


@pytest.mark.parametrize(
    ("name", "characters"),
    {
        "alpha": string.ascii_letters,
        "digit": string.digits,
        "alnum": string.ascii_letters + string.digits,
        "upper": string.ascii_uppercase,
        "lower": string.ascii_lowercase,
        "space": string.whitespace,
        "xdigit": string.hexdigits,
        "punct": string.punctuation,
        "blank": " \t",
    }.items(),
)
def test_classes_have_the_characters_of_posix(name, characters):
    others = {chr(each) for each in range(128)} - set(characters)
    assert code(f"[[:{name}:]]") == "".join(sorted(characters))
    assert code(f"[![:{name}:]]") == "".join(sorted(others))
    assert code(f"[_[:{name}:]~]") == "".join(sorted({*characters, "_", "~"}))


@pytest.mark.parametrize("text", [r"\x00", r"\0", r"\000", r"\u0", r"\xg", r"\u", r"\U", r"\cA"])
def test_escapes_without_a_character_of_text_are_not_supported(text):
    assert unescape(f"a{text} b") is None
