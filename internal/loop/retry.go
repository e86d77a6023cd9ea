package loop

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// Backoff is the wait after each of a row of failures: it doubles from Min to Max, and starts anew
// after Reset. It is not safe for concurrent use.
type Backoff struct {
	Min, Max time.Duration
	next     time.Duration
}

// Next returns how long to wait after one more failure.
func (b *Backoff) Next() time.Duration {
	wait := max(b.next, b.Min)
	b.next = min(2*wait, b.Max)
	return wait
}

// Reset notes a success.
func (b *Backoff) Reset() { b.next = 0 }

// Retry calls attempt again and again until ctx ends, and returns nil then. attempt says whether it
// succeeded for a while, after which the waits start anew; its error is for itself to report.
func Retry(ctx context.Context, backoff Backoff, attempt func(context.Context) (worked bool)) error {
	for ctx.Err() == nil {
		if attempt(ctx) {
			backoff.Reset()
		}
		if !sleep(ctx, backoff.Next()) {
			return nil
		}
	}
	return nil
}

// Failures logs a row of failures once for each message, and its end. The zero value is ready for
// use; it is not safe for concurrent use.
type Failures struct {
	// Repeat, unless 0, has a row of failures logged again after that time and not before, whatever
	// its messages.
	Repeat time.Duration

	last string
	at   time.Time
}

// Log takes how one attempt has ended: err is logged as a warning unless it was logged before, and
// a success after a failure as information. A ctx that was cancelled is neither.
func (f *Failures) Log(log *slog.Logger, failing, again string, err error, args ...any) {
	switch {
	case errors.Is(err, context.Canceled):
	case err == nil && f.last != "":
		log.Info(again, args...)
		f.last = ""
	case err != nil && f.isNews(err):
		log.Warn(failing, append([]any{"error", err}, args...)...)
		f.last, f.at = err.Error(), time.Now()
	}
}

func (f *Failures) isNews(err error) bool {
	if f.Repeat == 0 || f.last == "" {
		return err.Error() != f.last
	}
	return time.Since(f.at) >= f.Repeat
}
