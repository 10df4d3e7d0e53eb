"""Colors: few, unlike each other, and with labels that can be read."""

import numpy as np

from jaxpar.pictures.style import PALETTE, color_of, text_color_on


def test_eight_devices_have_eight_colours():
    assert len(set(map(color_of, range(8)))) == 8


def test_labels_stand_out_from_their_background():
    def luminance(color):
        channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    for number in range(len(PALETTE)):
        for paleness in (0, 0.3, 0.65):
            color = color_of(number, paleness)
            low, high = sorted((luminance(color), luminance(text_color_on(color))))
            assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2.2, level AA
