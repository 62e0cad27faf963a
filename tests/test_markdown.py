"""Commands write their own section of a page and leave the others alone."""

from __future__ import annotations

from anchorcontext.markdown import markdown_table, write_section


def test_a_section_is_replaced_in_its_place(tmp_path):
    page = tmp_path / "docs" / "page.md"
    write_section(page, "a", "one")
    write_section(page, "b", "two")
    write_section(page, "a", r"three \1")
    assert page.read_text() == (
        "# Page\n\n<!-- begin a -->\nthree \\1\n<!-- end a -->\n\n"
        "<!-- begin b -->\ntwo\n<!-- end b -->\n"
    )


def test_all_columns_but_the_first_are_right_aligned():
    assert markdown_table(["mode", "ms"], [["anchor", 3]]) == (
        "| mode | ms |\n| :-- | --: |\n| anchor | 3 |"
    )
