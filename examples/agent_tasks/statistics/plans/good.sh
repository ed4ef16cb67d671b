sed -i 's|    middle = mean(values)|    values = list(values)\n    middle = mean(values)|' stats.py
sed -i 's|    return {$|    values = list(values)\n    return {|' stats.py
