package main

import (
	"maps"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestVRFsOfRouters(t *testing.T) {
	got := vrfsOf(map[string]lb.Router{"tor": {}, "a": {VRF: "red"}, "b": {VRF: "red"}, "c": {VRF: "blue"}})
	if want := map[string]bool{"red": true, "blue": true}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
