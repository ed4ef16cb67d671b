sed -i 's|    for _ in range(attempts):|    while True:|' retries.py
sed -i 's|except BaseException:|except TemporaryError:|' retries.py
