"""The report: runs on any laptop, never imports torch. Its files, by what they do:

reading     reading.py (a box's folder), lines.py, points.py, box.py (what all of them give), library.py (published
            measurements); logs/ (other trainers' logs)
comparing   comparing.py (what must be equal), rates.py (how many times faster), fits.py, published.py (pairs of GPUs by
            name), projection.py (a GPU nobody measured here)
deciding    decision.py (one dict of it all), gate.py, cost.py, verdict.py
showing     verdict_text.py (the page), table.py, tables.py, companions.py, figure.py; page.py, charts.py and html/ (the
            HTML page); command.py (what the scripts ask for alike)
"""
