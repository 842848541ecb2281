"""Settings of a run as text, with their origins, and as a file."""

from megatron_train.config.dump import format_config, write_config
from megatron_train.config.values import GivenValue, Values

from .test_configuration import MINIMAL, parse


def test_settings_are_lines_with_their_origins_in_a_column():
    paths = tuple(f"corpus-{number:02}-é" for number in range(20))
    run = parse(MINIMAL.replace("--data-path corpus", f"--data-path {' '.join(paths)}"))
    given = Values({"data.data_path": GivenValue(paths, "--data-path")})
    lines = format_config(run, given).splitlines()
    assert lines[0] == "model:" and not any(line.endswith(" ") for line in lines)
    for text, origin in (
        ("  seed: 1234", "default"),
        ("  ffn_hidden_size: 32", "derived"),
        ("  # load: not set", "default"),
        (f"  data_path: [{', '.join(paths)}]", "--data-path"),
    ):
        assert f"{text.ljust(44)}  # {origin}" in lines


def test_settings_are_written_to_a_folder_that_is_made(tmp_path):
    run, path = parse(f"{MINIMAL} --no-progress --split 9,1,0"), tmp_path / "a" / "b" / "run.yaml"
    for _ in range(2):
        write_config(run, path)
        assert parse("", path) == run
    assert [file.name for file in path.parent.iterdir()] == ["run.yaml"]
