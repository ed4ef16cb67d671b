sed -i 's|except BaseException:|except TemporaryError:|' retries.py
