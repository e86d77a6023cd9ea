package leaktest

import (
	"maps"
	"testing"
)

type node struct {
	names  []string
	others map[string]*node
	queue  chan int
	self   *node
	any    any
}

func TestEntries(t *testing.T) {
	n := &node{names: []string{"a", "b"}, queue: make(chan int, 3), any: []int{1}}
	n.self, n.others = n, map[string]*node{"x": {names: []string{"c"}}, "y": {names: []string{"d", "e"}}}
	n.queue <- 1
	want := map[string]int{".names": 2, ".others": 2, ".others[].names": 3, ".others[].others": 0, ".others[].queue": 0,
		".queue": 1}
	if got := Entries(n); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	got := Entries(n, "others", "queue")
	if want := (map[string]int{".names": 2}); !maps.Equal(got, want) {
		t.Errorf("without some: got %v, want %v", got, want)
	}
}
