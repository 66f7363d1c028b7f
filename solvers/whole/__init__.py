"""Plans of whole graphs in one program: bounds by relaxation, schedules by repair."""
