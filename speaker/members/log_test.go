package members

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Everybody who reaches the port of gossip can have a line logged for each packet. A flood fills no
// disk.
func TestFloodIsNotLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		b := &logBridge{log: slog.New(slog.NewTextHandler(&out, nil))}
		for i := range 10_000 {
			fmt.Fprintf(b, "[ERR] memberlist: Decrypt packet failed: %d", i)
		}
		if lines := strings.Count(out.String(), "\n"); lines != maxLines {
			t.Errorf("%d lines, want %d", lines, maxLines)
		}
		time.Sleep(time.Second)
		fmt.Fprint(b, "[WARN] memberlist: one more")
		if !strings.Contains(out.String(), `msg="gossip: one more" leftOut=9950`) {
			t.Errorf("what was left out is not told: %s", out.String()[strings.LastIndex(out.String(), "time="):])
		}
	})
}
