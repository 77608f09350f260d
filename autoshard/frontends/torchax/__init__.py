"""Capture through torchax, on any torch from 2.9 on."""
