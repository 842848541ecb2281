"""What text is read from: a corpus in pieces of bounded size, one kind of input a module.

`protocol` says what a source is, `json_lines` and `text_files` are the two there are, `opening`
decides which of them a path is.
"""
