"""Shared by both front ends: the traced step and its numbered sequence of aten ops."""
