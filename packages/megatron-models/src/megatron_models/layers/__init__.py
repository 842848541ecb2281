"""The layers of a GPT, one file each; activations are ``[s, b, h]`` everywhere."""
