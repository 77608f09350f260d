"""What both front ends share: the traced step and its numbered sequence of aten ops."""
