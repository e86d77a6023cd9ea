package chaos

import (
	"testing"
	"testing/synctest"
	"time"
)

// What was written before the time that counts does not, however much. Then there is a change each 10 ms for two
// seconds, and a few more.
func TestWritesInASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w writes
		add := func(n int, every time.Duration) {
			for range n {
				w.note()
				time.Sleep(every)
			}
		}
		add(200, time.Millisecond)
		began := time.Now()
		if all, most := w.since(began); all != 0 || most != 0 {
			t.Errorf("nothing was written, and %d were, %d in a second", all, most)
		}
		add(200, 10*time.Millisecond)
		add(5, time.Second)
		if all, most := w.since(began); all != 205 || most != 100 {
			t.Errorf("%d changes, %d in a second; want 205 and 100", all, most)
		}
	})
}
