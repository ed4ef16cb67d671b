sed -i 's|    middle = mean(values)|    values = list(values)\n    middle = mean(values)|' stats.py
