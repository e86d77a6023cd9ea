package loop

import (
	"context"
	"errors"
	"fmt"
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

const (
	// changedAfter is how long a row of failures with another message than the one that was logged
	// waits to be logged again: messages with ports in them, or lists, differ at each attempt.
	changedAfter = time.Minute
	// maxMessage is how many characters of a message are logged.
	maxMessage = 500
)

// Failures logs the first of a row of failures, the later ones at most once a minute and only if
// they have another message than the last that was logged, and the end of the row. It cuts long
// messages. The zero value is ready for use; it is not safe for concurrent use.
type Failures struct {
	// Repeat, unless 0, has a row of failures logged again after that time and not before, whatever
	// its messages.
	Repeat time.Duration

	last string    // as it was logged
	at   time.Time // when last was logged; zero outside of a row of failures
}

// Log takes how one attempt has ended: err is logged as a warning if it begins a row of failures or
// is due in it, and a success after a failure as information. A ctx that was cancelled is neither.
func (f *Failures) Log(log *slog.Logger, failing, again string, err error, args ...any) {
	switch {
	case errors.Is(err, context.Canceled):
	case err != nil:
		if message := cut(err.Error()); f.isDue(message) {
			log.Warn(failing, append([]any{"error", message}, args...)...)
			f.last, f.at = message, time.Now()
		}
	case !f.at.IsZero():
		log.Info(again, args...)
		f.last, f.at = "", time.Time{}
	}
}

func (f *Failures) isDue(message string) bool {
	switch {
	case f.at.IsZero():
		return true
	case f.Repeat != 0:
		return time.Since(f.at) >= f.Repeat
	default:
		return message != f.last && time.Since(f.at) >= changedAfter
	}
}

// cut returns the beginning of a long message, and how much is missing.
func cut(message string) string {
	characters := []rune(message)
	if len(characters) <= maxMessage {
		return message
	}
	return fmt.Sprintf("%s... (%d more characters)", string(characters[:maxMessage]), len(characters)-maxMessage)
}
