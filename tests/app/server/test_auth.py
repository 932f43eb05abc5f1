"""Access to the server and the demo, and the addresses that other machines can reach."""

import pytest

from arimage.app.server.auth import check_password, check_tokens, is_local


OTHERS = ("0.0.0.0", "::", "192.168.0.1", "example.org", "localhost.example.org")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_nobody_else_reaches_a_local_address(host, monkeypatch):
    monkeypatch.delenv("ARIMAGE_TOKEN", raising=False)
    assert is_local(host)
    assert check_tokens(host, None, no_auth=False) == () and check_password(host, None) is None


@pytest.mark.parametrize("host", OTHERS)
def test_an_address_that_others_reach_needs_a_token_or_a_password(host, monkeypatch):
    monkeypatch.delenv("ARIMAGE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="--token-file"):
        check_tokens(host, None, no_auth=False)
    assert check_tokens(host, None, no_auth=True) == ()
    with pytest.raises(ValueError, match="--auth user:password"):
        check_password(host, None)
    assert check_password(host, "ada:opens:sesame") == ("ada", "opens:sesame")


def test_a_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("from-file\nanother\n")
    monkeypatch.setenv("ARIMAGE_TOKEN", "from-environment")
    assert check_tokens("0.0.0.0", tmp_path / "token", no_auth=False) == ("from-file", "another")
    assert check_tokens("0.0.0.0", None, no_auth=False) == ("from-environment",)
    monkeypatch.setenv("ARIMAGE_TOKEN", " ")
    with pytest.raises(ValueError, match="ARIMAGE_TOKEN"):
        check_tokens("127.0.0.1", None, no_auth=False)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"", b"caf\xc3\xa9"])
def test_a_token_file_that_holds_none_is_named(tmp_path, content):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"--token-file {file}"):
        check_tokens("127.0.0.1", file, no_auth=False)
    with pytest.raises(ValueError, match=f"--token-file {tmp_path}"):
        check_tokens("127.0.0.1", tmp_path, no_auth=False)


@pytest.mark.parametrize("auth", ["ada", ":x", "ada:", ""])
def test_a_password_has_a_user(auth):
    with pytest.raises(ValueError, match="user:password"):
        check_password("127.0.0.1", auth)
